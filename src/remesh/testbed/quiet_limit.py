"""Time limit on progress, not on time since the start: a machine may be slow."""

from __future__ import annotations

import time
from collections.abc import Callable


class QuietLimit:
    """Counts from the last change of what ``progress`` returns; to be asked every now and then."""

    def __init__(self, progress: Callable[[], object], limit_s: float) -> None:
        self.limit_s = limit_s
        self._progress = progress
        self._last: object = None
        self._since_s: float | None = None

    def is_over(self) -> bool:
        """Whether nothing has changed for too long."""
        now_s, found = time.monotonic(), self._progress()
        if self._since_s is None or found != self._last:
            self._last, self._since_s = found, now_s
        return now_s - self._since_s > self.limit_s
