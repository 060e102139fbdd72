"""Bringing a tree of processes back from its image."""
