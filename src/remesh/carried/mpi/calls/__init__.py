"""The calls that cross the channel: one table that both halves read."""
