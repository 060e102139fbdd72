"""A worker's line to its agent, and what a signal to all processes of a node does while there is one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from remesh.elasticity.link import WorkerLink

pytestmark = pytest.mark.procs


class _SilentAgent:
    """A line on which nothing comes until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def receive(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def _linked() -> WorkerLink:
    line: Any = _SilentAgent()
    link = WorkerLink(line, lambda _: True)
    link.start()
    return link


def test_a_linked_worker_outlives_sigterm_and_a_process_that_it_forks_does_not() -> None:
    """Loaders of data are ended by it: they must not inherit what their worker does."""
    link = _linked()
    os.kill(os.getpid(), signal.SIGTERM)
    hears, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tells, b".")
        signal.pause()
        os._exit(1)
    os.read(hears, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    link.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.close(hears)
    os.close(tells)


def test_a_program_that_has_a_handler_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    link = _linked()
    os.kill(os.getpid(), signal.SIGTERM)
    link.close()
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
