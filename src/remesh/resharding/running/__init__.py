"""The ranks of a group carry plans out: agreement, memory, messages, and what is kept for the next time."""
