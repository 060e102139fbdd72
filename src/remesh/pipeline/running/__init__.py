"""Execution of a schedule by ranks: stages, edges, steps."""
