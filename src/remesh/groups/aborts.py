"""Aborts of NCCL communicators, in parallel and with a time limit.

An abort by itself waits for the device, and so for what another communicator has spinning there: they end together, or
not at all. torch makes a thread for each, so an ``ncclGroup``, which belongs to one thread, would not join them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from remesh.foundation.errors import PeerError
from remesh.foundation.threads import make_thread


class Aborts:
    """Communicators that are being aborted, those of each group in a thread of their own."""

    def __init__(self, aborts: Sequence[Callable[[], None]]) -> None:
        """Begin; each of ``aborts`` ends those of one group."""
        self._errors: list[Exception] = []
        self._threads = [make_thread("abort", self._work, abort, daemon=True) for abort in aborts]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout: timedelta) -> None:
        """Return when all have ended; `PeerError` when they have not, for this long."""
        limit_s = time.monotonic() + timeout.total_seconds()
        for thread in self._threads:
            thread.join(max(0.0, limit_s - time.monotonic()))
        if self._errors or any(thread.is_alive() for thread in self._threads):
            found = next(iter(self._errors), f"it was still under way after {timeout.total_seconds():g} s")
            raise PeerError(
                f"aborting communicators on the device of this rank: expected them to end, found: {found}; the device "
                "is of no use to this process any more, start it again"
            )

    def _work(self, abort: Callable[[], None]) -> None:
        try:
            abort()
        except Exception as raised:  # raised by the wait
            self._errors.append(raised)
