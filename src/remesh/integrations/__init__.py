"""Remesh in programs that others wrote: one module for each host program, imported by the user who wants it."""
