"""Calls that cross the channel between the two halves: one table that both read."""
