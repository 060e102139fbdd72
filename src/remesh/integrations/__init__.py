"""Remesh under programs that others wrote: one module for each host, imported by who asks for it."""
