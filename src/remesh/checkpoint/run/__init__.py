"""Execution of saves, loads and operations on whole checkpoints."""
