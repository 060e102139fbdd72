"""Threads that Remesh starts in this process: the one place that makes them.

`make_thread` gives each a name, ``remesh-<what>``, and lets it take no signal. A program blocks a signal in its own
threads to wait for it (``sigwait``, a signalfd); a thread of Remesh that does not block it would take it, and the
default action ends the process. Processes that are started from such a thread inherit this: they begin by unblocking.

`remesh.foundation.thread_pool` does tasks on threads that are made here.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, Final

_OF_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
"""Signals of a thread's own faults: blocked, they would end the process without a word of `faulthandler`."""


class _Thread(threading.Thread):
    """A thread that inherits a mask of signals under which it takes none."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_FAULTS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_thread(what: str, act: Callable[..., object], *args: Any, daemon: bool) -> threading.Thread:
    """A thread named after what it does, to be started. The end of the process waits for it unless it is a daemon."""
    return _Thread(target=act, args=args, name=f"remesh-{what}", daemon=daemon)
