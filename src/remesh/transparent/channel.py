"""The channel between the two halves of a rank: one file, mapped by both, with a futex to wait on."""

from __future__ import annotations

from typing import Self


class Channel:
    """A mapped file of :data:`SIZE_BYTES` bytes; holds no descriptor once it is open."""

    SIZE_BYTES = 1 << 20

    @classmethod
    def create(cls, path: str) -> Self:
        """Make the file (zeros, mode 0600; never an existing one) and map it. The lower half does this."""
        raise NotImplementedError

    @classmethod
    def map(cls, path: str) -> Self:
        """Map an existing file. The upper half does this."""
        raise NotImplementedError
