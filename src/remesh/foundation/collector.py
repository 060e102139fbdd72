"""Pause of the cyclic garbage collector while a checkpoint or a move is planned.

A hundred thousand small values are made then, none in a cycle, and looking through all of them again and again costs as
much as making them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_num_pauses = 0
"""That threads of this process are in; a fork has none but that which forked, and collects."""


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the cyclic garbage collector from running within the block; memory is still freed by reference counts.

    ``@collector_at_rest()`` does so for a function. What comes out is the same with and without.
    """
    if not gc.isenabled():
        yield
        return
    global _num_pauses
    gc.disable()
    _num_pauses += 1
    try:
        yield
    finally:
        _num_pauses -= 1
        gc.enable()


def go_on_in_fork() -> None:
    """Collect again where other threads than that which forked were in a pause."""
    if _num_pauses:
        gc.enable()
