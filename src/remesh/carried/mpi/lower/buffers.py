"""Large buffers of a lower half, which are used again: a fresh one costs a page fault for every page."""

from __future__ import annotations

import mmap
from typing import Final

_UNIT_BYTES: Final = 1 << 21
"""A huge page: to carry bytes between processes takes a third of the time on these."""
_MOST_KEPT_BYTES: Final = 64 << 20


class LargeBuffers:
    """A pool of large buffers, which it lends and takes back."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        """The free buffers, in the order in which they came back."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that are not lent."""
        return sum(map(len, self._free))

    def lend(self, num_bytes: int) -> memoryview:
        """Lend a buffer of ``num_bytes``, at least one, with any content."""
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
        """Take back a buffer that was lent here and is no longer used; any other object is left alone."""
        if isinstance(lent, memoryview) and isinstance(lent.obj, mmap.mmap):
            self._free.append(lent.obj)
            while self.kept_bytes > _MOST_KEPT_BYTES:
                # The memory of a buffer goes with its last view.
                del self._free[0]
