"""Saves that go on behind the training loop: copies, workers, and the queue that finishes on all ranks."""
