"""Lines that a logger of ours was given, as a list."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def log_lines(name: str) -> Iterator[list[str]]:
    """Messages for the logger ``name`` and those below it, while the block runs."""
    lines: list[str] = []
    handler = _Lines(lines)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
