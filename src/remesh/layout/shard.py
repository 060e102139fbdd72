"""Shard: one holder's box of a tensor, and where it lies in the holder's memory.

Definitions. A *holder* is anything that can hold a box: an ``int`` is a world rank, a ``str`` names any other
place (a file, a snapshot). A *shard* is a box with its holder and the affine map from global index to element
of the holder's buffer. Holders that keep the same box are *replicas* of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box, row_major_strides

Holder = int | str
"""A world rank (int), or the name of another place (str): ``"file:__0_0.distcp"``, ``"snapshot:3"``."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A box, its holder, and where the holder keeps it.

    The element with global index ``x`` lies at ``offset + sum((x[d] - box.start[d]) * strides[d])`` of the
    holder's buffer, counted in elements. A plain shard has offset 0 and row-major strides of its own shape;
    a part of a packed or flattened buffer has others.
    """

    holder: Holder
    box: Box
    offset: int = 0
    """Element of the holder's buffer where the box begins. Invariant: >= 0."""
    strides: tuple[int, ...] | None = None
    """Elements between neighbours in each dim; None is filled in with row-major strides of ``box.shape``."""
    addend: int = 0
    """Which addend of a partial sum the holder keeps; 0 when the layout is not partial. Invariant: >= 0.
    Shards of one box with one addend are replicas; those with different addends must be reduced together."""

    def __post_init__(self) -> None:
        strides = self.strides
        if strides is None:
            strides = row_major_strides(self.box.shape)
            object.__setattr__(self, "strides", strides)
        if len(strides) != self.box.ndim or self.offset < 0 or (strides and min(strides) < 0):
            raise LayoutError(
                f"placing box {self.box} in the buffer of holder {self.holder!r}: offset {self.offset} and strides "
                f"{strides} must be >= 0, with one stride for each of {self.box.ndim} dims"
            )
        if self.addend < 0:
            raise LayoutError(
                f"placing box {self.box} with holder {self.holder!r}: addend {self.addend} must be >= 0; number the "
                "addends of a partial sum from 0"
            )

    def offset_of(self, box: Box) -> int:
        """Element of the holder's buffer where ``box``, which must lie inside this shard's box, begins."""
        inner = box.relative_to(self.box)
        assert self.strides is not None
        return self.offset + sum(at * stride for at, stride in zip(inner.start, self.strides, strict=True))


def holder_order(holder: Holder) -> tuple[bool, int, str]:
    """Sort key of holders: ranks by number, then named places by name."""
    return (False, holder, "") if isinstance(holder, int) else (True, 0, holder)
