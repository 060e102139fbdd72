"""Hangs with their culprit's name, and ranks that are slower than the others."""
