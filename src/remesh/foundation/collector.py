"""Should Python look for garbage while a checkpoint or a move is planned? No: a hundred thousand small values are made,
none in a cycle, and looking through all of them again and again costs as much as making them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the cyclic garbage collector from running within the block; memory is still freed by reference counts.

    ``@collector_at_rest()`` does so for a function. What comes out is the same with and without.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
