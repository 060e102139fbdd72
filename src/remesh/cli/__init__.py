"""The ``remesh`` command: one file per verb, each loaded when it is asked for."""

from remesh.cli.group import main

__all__ = ["main"]
