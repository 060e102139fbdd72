"""Integrations: one module for each host program, imported by the user who wants it."""
