"""Execution of plans by the ranks of a group: agreement, memory, messages, and what is kept for the next time."""
