"""Shorter thread switch interval of the interpreter (0.5 ms) while a process is frozen.

A thread that comes back from the disk waits for the interpreter's lock, which the running thread releases after 5 ms by
default: as long as four chunks of pages take to be written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SWITCH_INTERVAL_S: Final = 0.0005


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Switch threads of this process at short intervals within the block; ``@short_switch_interval()`` in a call."""
    before_s = sys.getswitchinterval()
    if before_s <= _SWITCH_INTERVAL_S:
        yield
        return
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
