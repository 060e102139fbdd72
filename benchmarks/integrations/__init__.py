"""Remesh under programs of others, beside what these do by themselves."""
