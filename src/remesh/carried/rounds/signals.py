"""Signal handlers of the process that leads a job. SIGTERM: a checkpoint, then the end. SIGINT: the end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from remesh.carried.rounds.leader import Coordinator


@contextlib.contextmanager
def obeying_signals(coordinator: Coordinator) -> Iterator[None]:
    """Hand signals on to the coordinator; only when called in the main thread, which alone can hear them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: coordinator.save_and_stop()),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: coordinator.interrupt()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
