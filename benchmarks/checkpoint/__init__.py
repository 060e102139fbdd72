"""Benchmarks of checkpoints: one process, beside native torch DCP and beside plain file operations."""
