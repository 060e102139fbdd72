"""Membership decisions of an agent: events in, instructions out, by a machine without I/O."""
