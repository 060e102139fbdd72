"""Asynchronous saves: copies, workers, and the queue that finishes on all ranks."""
