"""Layouts: which holder keeps which boxes of one tensor, and where in its memory.

Everything downstream of this module sees boxes only: specs, placements, grids, flat ranges and packed blocks
are all turned into shards before any of them is compared with another.

A layout is a value and may be anything: incomplete (one rank's view), self-overlapping (the union of what two meshes
hold). The ``check_`` methods verify the properties that a caller needs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from remesh.foundation.errors import LayoutError
from remesh.layout.atoms import Atoms, compute_atoms
from remesh.layout.box import Box
from remesh.layout.box_array import BoxArray, find_pairs, is_disjoint
from remesh.layout.cover import subtract_all
from remesh.layout.dtypes import itemsize_bytes
from remesh.layout.shard import Holder, Shard, holder_order

__all__ = ["Holder", "Layout", "Shard"]

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Reductions that join the addends of a partial tensor, by torch's names."""


MAX_ELEMENTS = 2**60
"""Largest tensor: flat indices are 64-bit integers in arrays, and sums of a few of them must not overflow."""


@dataclass(frozen=True)
class Layout:
    """The boxes of one tensor, and the holders of each.

    >>> whole = Box.of_shape((4, 2))
    >>> layout = Layout((4, 2), tuple(Shard(rank, half) for rank, half in enumerate(whole.split(0, 2))), "float32")
    >>> layout.holders, layout.nbytes_of(0)
    ((0, 1), 16)
    """

    global_shape: tuple[int, ...]
    """Shape of the whole tensor, in elements. Invariant: every size >= 0, product <= MAX_ELEMENTS."""
    shards: tuple[Shard, ...]
    """Who keeps which box; boxes are in global indices. Invariant: ``len(global_shape)`` dims each."""
    dtype: str
    """Name of the element type; see :mod:`remesh.layout.dtypes`. Invariant: known there."""
    partial: str | None = None
    """Reduction that joins the addends, or None when every shard has final values. Invariant: in REDUCE_OPS."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(map(operator.index, self.global_shape)))
        object.__setattr__(self, "shards", tuple(self.shards))
        if any(size < 0 for size in self.global_shape):
            raise LayoutError(
                f"making a layout: global shape {self.global_shape} has a negative size, expected sizes >= 0; give the "
                "shape of the whole tensor"
            )
        if math.prod(max(size, 1) for size in self.global_shape) > MAX_ELEMENTS:
            raise LayoutError(
                f"making a layout: global shape {self.global_shape} has {math.prod(self.global_shape)} elements, "
                f"expected at most {MAX_ELEMENTS}; flat indices must fit into 64 bits"
            )
        itemsize_bytes(self.dtype)
        if self.partial is not None and self.partial not in REDUCE_OPS:
            raise LayoutError(f"making a layout: partial {self.partial!r} is no reduction; known are {REDUCE_OPS}")
        ndim = len(self.global_shape)
        for shard in self.shards:
            if len(shard.box.start) != ndim:
                raise LayoutError(
                    f"making a layout: holder {shard.holder!r} has box {shard.box} of {shard.box.ndim} dims, expected "
                    f"{ndim} as in global shape {self.global_shape}; give each box one start and one stop per dim"
                )
            if shard.addend and self.partial is None:
                raise LayoutError(
                    f"making a layout: holder {shard.holder!r} keeps addend {shard.addend} of box {shard.box}, but the "
                    "layout is not partial; name its reduction, or leave the addend 0"
                )

    @property
    def ndim(self) -> int:
        return len(self.global_shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.global_shape)

    @property
    def itemsize_bytes(self) -> int:
        return itemsize_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, counted once."""
        return self.size * self.itemsize_bytes

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        """Every holder once: ranks by number, then named places by name."""
        return tuple(sorted({shard.holder for shard in self.shards}, key=holder_order))

    @cached_property
    def atoms(self) -> Atoms:
        """The distinct disjoint pieces of this layout, each with all its shards."""
        return compute_atoms(self.shards, self.ndim)

    @cached_property
    def _shards_by_holder(self) -> dict[Holder, tuple[Shard, ...]]:
        found: dict[Holder, list[Shard]] = {}
        for shard in self.shards:
            found.setdefault(shard.holder, []).append(shard)
        return {holder: tuple(shards) for holder, shards in found.items()}

    def shards_of(self, holder: Holder) -> tuple[Shard, ...]:
        """The shards of this holder, in the order of the layout; empty if the holder is unknown."""
        return self._shards_by_holder.get(holder, ())

    def nbytes_of(self, holder: Holder) -> int:
        """Bytes this holder keeps."""
        return sum(shard.box.size for shard in self.shards_of(holder)) * self.itemsize_bytes

    def map_holders(self, mapping: Mapping[Holder, Holder] | Callable[[Holder], Holder]) -> Layout:
        """The same boxes with renamed holders, e.g. world ranks turned into ranks of a group."""
        if isinstance(mapping, Mapping):
            lacking = [holder for holder in self.holders if holder not in mapping]
            if lacking:
                raise LayoutError(
                    f"renaming the holders of a layout: {len(lacking)} of {len(self.holders)} have no new name, first "
                    f"{lacking[0]!r}; give each a name, or restrict the layout first"
                )
            rename: Callable[[Holder], Holder] = mapping.__getitem__
        else:
            rename = mapping
        return replace(self, shards=tuple(replace(shard, holder=rename(shard.holder)) for shard in self.shards))

    def restrict(self, holders: Iterable[Holder]) -> Layout:
        """The layout of these holders only, e.g. the survivors of a failure; usually not complete."""
        wanted = set(holders)
        return replace(self, shards=tuple(shard for shard in self.shards if shard.holder in wanted))

    def merge(self, other: Layout) -> Layout:
        """The union: the shards of either layout. Boxes may then overlap partially, which a source may."""
        for what, mine, theirs in (
            ("global shape", self.global_shape, other.global_shape),
            ("dtype", self.dtype, other.dtype),
            ("partial", self.partial, other.partial),
        ):
            if mine != theirs:
                raise LayoutError(
                    f"merging two layouts: {what} is {mine!r} on one side and {theirs!r} on the other, expected equal; "
                    "both must describe the same tensor"
                )
        return replace(self, shards=self.shards + other.shards)

    def check(self, name: str = "tensor") -> None:
        """Raise LayoutError unless the boxes are in bounds, disjoint per replica set and complete."""
        self.check_in_bounds(name)
        self.check_disjoint(name)
        self.check_complete(name)

    def check_in_bounds(self, name: str = "tensor") -> None:
        """Raise LayoutError if a box, even an empty one, reaches past the global shape."""
        for shard in self.shards:
            for dim, (stop, size) in enumerate(zip(shard.box.stop, self.global_shape, strict=True)):
                if stop > size:
                    raise LayoutError(
                        f"checking the layout of {name!r}: holder {shard.holder!r} has box {shard.box}, which ends at "
                        f"{stop} in dim {dim}, expected at most {size} (global shape {self.global_shape}); correct "
                        "the box or the shape"
                    )

    def check_disjoint(self, name: str = "tensor") -> None:
        """Raise LayoutError if boxes overlap that are not equal, or a holder keeps a box twice.

        Of a partial layout: among the shards of one addend.
        """
        for addend, shards in self._shards_by_addend().items():
            holder_of: dict[Box, Holder] = {}
            seen = set()
            for shard in shards:
                if shard.box.is_empty:
                    continue
                if (shard.holder, shard.box) in seen:
                    raise LayoutError(
                        f"checking the layout of {name!r}: holder {shard.holder!r} has box {shard.box} twice"
                        f"{self._of_addend(addend)}, expected once; drop one of them"
                    )
                seen.add((shard.holder, shard.box))
                holder_of[shard.box] = shard.holder
            _check_boxes_disjoint(holder_of, self.ndim, f"{name!r}{self._of_addend(addend)}")

    def check_complete(self, name: str = "tensor") -> None:
        """Raise LayoutError if an element has no holder; of a partial layout, if any addend lacks one."""
        for addend, shards in self._shards_by_addend().items():
            atoms = self.atoms if self.partial is None else compute_atoms(shards, self.ndim)
            held = int(atoms.boxes.sizes.sum())
            if held < self.size:
                lacking = subtract_all(Box.of_shape(self.global_shape), map(atoms.boxes.box, range(len(atoms))))
                raise LayoutError(
                    f"checking the layout of {name!r}: {len(self.holders)} holders keep {held} of {self.size} elements"
                    f"{self._of_addend(addend)}, expected all; no holder has box {lacking[0]} (and {len(lacking) - 1} "
                    "more boxes); add the holder that has it"
                )

    def _shards_by_addend(self) -> dict[int, list[Shard]]:
        """The shards of each addend, and none for the lowest that is missing; one group if it is not partial."""
        groups: dict[int, list[Shard]] = {0: []}
        for shard in self.shards:
            groups.setdefault(shard.addend, []).append(shard)
        # The numbering has no gaps: one empty group shows any that is missing, however high the others are.
        if max(groups) >= len(groups):
            groups[next(addend for addend in range(len(groups)) if addend not in groups)] = []
        return dict(sorted(groups.items()))

    def _of_addend(self, addend: int) -> str:
        return "" if self.partial is None else f" of addend {addend}"


def _check_boxes_disjoint(holder_of: dict[Box, Holder], ndim: int, what: str) -> None:
    boxes = list(holder_of)
    array = BoxArray.of(boxes, ndim)
    if is_disjoint(array):
        return
    index_a, index_b = find_pairs(array, array)
    pair = int((index_a != index_b).argmax())
    a, b = boxes[int(index_a[pair])], boxes[int(index_b[pair])]
    shared = a.intersect(b)
    raise LayoutError(
        f"checking the layout of {what}: box {a} of holder {holder_of[a]!r} and box {b} of holder {holder_of[b]!r} "
        f"share {shared} ({shared.size if shared else 0} elements), expected 0 shared elements or equal boxes; cut "
        "both at the same places"
    )
