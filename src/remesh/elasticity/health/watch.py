"""Sampler of the main thread's stack, from another thread.

A *sample* is one look: the main thread is inside a collective if a frame of it belongs to torch's collectives. It costs
some ten microseconds, and delays the main thread by no more than that.
"""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from types import FrameType

from remesh.foundation.threads import make_thread

SAMPLE_INTERVAL_S = 0.02
MAX_STACK_CHARS = 20_000
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_LIBRARY_PARTS = ("/torch/", "/remesh/", "/lib/python")


@dataclass(frozen=True, slots=True)
class StackSample:
    """The result of one look at the main thread."""

    collective: str
    """Name of the outermost collective call; empty when the thread is in none."""
    place: str
    """Innermost line of user code."""
    text: str
    """The stack, outermost first."""


def look_at_main_thread() -> StackSample:
    """The current stack of the main thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return StackSample("", "no Python code", "")
    text = "".join(traceback.format_stack(frame))[-MAX_STACK_CHARS:]
    return StackSample(find_collective(frame), find_user_line(frame), text)


def find_collective(frame: FrameType | None) -> str:
    """Name of the outermost function of torch's collectives in a stack; empty when there is none."""
    found = ""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COLLECTIVE_FILES) and frame.f_code.co_name != "wrapper":
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def find_user_line(frame: FrameType | None) -> str:
    """The innermost line outside libraries; the innermost at all when there is none."""
    innermost = frame
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _LIBRARY_PARTS):
            break
        frame = frame.f_back
    chosen = frame or innermost
    if chosen is None:
        return ""
    name = chosen.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{chosen.f_lineno} in {chosen.f_code.co_name}"


class BusyMeter:
    """Measures which share of its time the main thread spends outside collectives, by sampling in a thread."""

    def __init__(self) -> None:
        self._samples = 0
        self._waiting = 0
        self._stop = threading.Event()
        self._thread = make_thread("meter", self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def take_share(self) -> float:
        """Share of the samples since the last call that saw the main thread working; 1 when there were none."""
        samples, waiting = self._samples, self._waiting
        self._samples, self._waiting = 0, 0
        return 1.0 - waiting / samples if samples else 1.0

    def _run(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._samples += 1
            # No frame is kept until the next look: it would keep alive all that its function had, as gradients.
            self._waiting += bool(find_collective(sys._current_frames().get(ident)))
