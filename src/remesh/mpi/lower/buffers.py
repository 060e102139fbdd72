"""Large buffers of a lower half, which are used again: a fresh one costs a page fault for every page."""

from __future__ import annotations

import mmap
from typing import Final

_UNIT_BYTES: Final = 1 << 21
"""A huge page: to carry bytes between processes takes a third of the time on these."""
_MOST_KEPT_BYTES: Final = 64 << 20


class LargeBuffers:
    """Lends buffers and takes them back."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        """In order of coming back."""

    @property
    def kept_bytes(self) -> int:
        """Of those that nobody has."""
        return sum(map(len, self._free))

    def lend(self, num_bytes: int) -> memoryview:
        """A buffer of ``num_bytes``, at least one, with anything in it."""
        wanted = -(-num_bytes // _UNIT_BYTES) * _UNIT_BYTES
        fitting = [buffer for buffer in self._free if wanted <= len(buffer) <= 2 * wanted]
        if fitting:
            buffer = min(fitting, key=len)
            self._free.remove(buffer)
        else:
            buffer = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(buffer)[:num_bytes]

    def take_back(self, lent: object) -> None:
        """A buffer that was lent here and that nobody uses any more; whatever else it is, nothing happens."""
        if isinstance(lent, memoryview) and isinstance(lent.obj, mmap.mmap):
            self._free.append(lent.obj)
            while self.kept_bytes > _MOST_KEPT_BYTES:
                # Its memory goes with the last view of it.
                del self._free[0]
