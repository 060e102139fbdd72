"""Formats on disk, one module each; nothing outside this package knows a file's bytes."""
