"""Moves of tensors, and their slices with everyone who can give them and everyone who wants them.

Definitions. A *move* takes one tensor from the layout that is to the layout that is wanted. A *unit task* is one
slice of the common refinement of the two: its *givers* hold all of it, its *takers* want all of it. A taker that
is a giver copies inside its own memory; only the other takers cause traffic.

Algorithm, for each move:

1. Refine the two layouts into slices (`remesh.resharding.model.slices`). Moves that share their layouts, as parameters
   and optimizer moments do, are refined once.
2. Count the elements: slices are disjoint, so if they add up to what is wanted, nothing is missing. Otherwise name the
   boxes that no rank holds.

*Casts.* A tensor is *held* in one dtype and *wanted* in another. It *travels* in the narrower of the two: a cast that
narrows is done by the rank that gives from its own memory, one that widens by the taker. So a relay passes bytes on and
never casts, every taker gets the value of exactly one cast, and the result is that of ``Tensor.to``. Only casts that
keep the meaning are made unasked: between floats, between complex numbers, and from integers to integers that have room
for all of them. Anything else is a clash.

*Stacks.* A model has many tensors of few kinds: each layer repeats the one before. Two tensors are *alike* where their
moves have the same two layouts, object for object, as `remesh.resharding.running.describe` makes them. A *stack* is all
tensors that are alike, as one tensor with a dim more: element ``[i, ...]`` of it is element ``[...]`` of the tensor
``i``, by name. It has the holders and takers of all elements, which is what a plan needs, and no memory: only the
tensor's own piece knows where its elements lie. So a thousand tensors of ten kinds are planned, checked and compared as
ten, and code that moves bytes asks `unstack` which tensors a box is of. Partial sums are left as they are: their whole
values have memory of their own.

Source: Zhuang et al., arXiv 2211.05322, appendix B.2.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard, itemsize_bytes
from remesh.resharding.model.slices import Slices, compute_slices

_MAX_LISTED = 4
_FLOATS = frozenset(
    {
        *("float64", "float32", "bfloat16", "float16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)
_COMPLEX = frozenset({"complex128", "complex64", "complex32"})
_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")

Alike = Mapping[str, tuple[str, ...]]
"""For the move of each stack the names of its tensors, of which the first is that of the move. Invariant: two or more,
ascending; a tensor that nothing is like is not in here."""


class Missing(Enum):
    """The treatment of wanted boxes that no rank holds."""

    REFUSE = "refuse"
    """Raise `PlanError`."""
    LEAVE = "leave"
    """Move the rest; the takers' elements in those boxes keep their values."""


class SumOrder(Enum):
    """The order in which addends of partial sums are joined. Of integers every order gives the same bits."""

    ASCENDING = "ascending"
    """By number, so that the bits of floats depend on nothing else."""
    ANY = "any"
    """For every box the one that ends with a rank that wants it: fewer bytes where many ranks want parts of a sum."""


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor, the layout it is in, and the layout it is wanted in."""

    name: str
    """Name of the tensor; distinct within a plan."""
    src: Layout
    """Who holds what. Invariant: holders are ranks of the group; what a move of partial sums needs before it can be
    cut into tasks is in `remesh.resharding.planning.reduction`."""
    dst: Layout
    """Who wants what. Invariant: same global shape as ``src``; holders are ranks of the group; no partial sums.

    Two dtypes that can be cast are both replaced by the one that travels (`travelling_dtype`): plans know no
    other, and a rank that keeps another one casts at its own memory. Partial sums keep theirs until they are summed."""

    def __post_init__(self) -> None:
        doing = f"planning the move of tensor {self.name!r}"
        if self.src.global_shape != self.dst.global_shape:
            raise PlanError(
                f"{doing}: it is held with global shape {self.src.global_shape} but wanted with "
                f"{self.dst.global_shape}; both sides must describe the same tensor"
            )
        if self.dst.partial is not None:
            raise PlanError(
                f"{doing}: it is requested as partial sums ({self.dst.partial}), expected whole values; take it "
                "whole and "
                "split it into addends where it is used"
            )
        travelling = travelling_dtype(self.src.dtype, self.dst.dtype)
        if travelling is None:
            raise PlanError(
                f"{doing}: it is held as {self.src.dtype} but wanted as {self.dst.dtype}, expected dtypes of one "
                "kind, where no integer overflows in the cast; cast one side to the dtype of the other first"
            )
        if self.src.partial is None:
            for side in ("src", "dst"):
                layout = getattr(self, side)
                if layout.dtype != travelling:
                    object.__setattr__(self, side, replace(layout, dtype=travelling))
        for shard in (*self.src.shards, *self.dst.shards):
            if not isinstance(shard.holder, int) or shard.holder < 0:
                raise PlanError(
                    f"{doing}: box {shard.box} has holder {shard.holder!r}, expected a rank of the group (an int "
                    ">= 0); map other places to ranks with Layout.map_holders"
                )


def number_layouts(moves: Sequence[TensorMove]) -> tuple[list[Layout], list[tuple[int, int]]]:
    """The distinct layouts of moves, and the numbers of the two of each move."""
    number_of: dict[Layout, int] = {}
    by_id: dict[int, int] = {}
    for move in moves:
        for layout in (move.src, move.dst):
            if id(layout) not in by_id:
                by_id[id(layout)] = number_of.setdefault(layout, len(number_of))
    return list(number_of), [(by_id[id(move.src)], by_id[id(move.dst)]) for move in moves]


def slices_of(moves: Sequence[TensorMove], missing: Missing = Missing.REFUSE) -> Slices:
    """The slices of all moves.

    Raises `PlanError` naming tensor and boxes when no rank holds something that is wanted, unless it may be left.
    """
    for move in moves:
        if move.src.partial is not None:
            raise PlanError(
                f"planning the move of tensor {move.name!r}: it is held as partial sums ({move.src.partial}), expected "
                "whole values; plan it with plan_transfer, which sums them on the way"
            )
    slices = compute_slices([(move.src, move.dst, move.name) for move in moves])
    if missing is Missing.REFUSE:
        for move, number in zip(moves, slices.block_of, strict=True):
            if slices.blocks[number].missing:
                unasked = [other.name for other in moves if other.src.shards and not other.dst.shards]
                raise _missing_error(move, slices.blocks[number].missing, unasked)
    return slices


def compute_missing_boxes(moves: Sequence[TensorMove]) -> dict[str, tuple[Box, ...]]:
    """The disjoint boxes of each tensor that are wanted and held by no rank; complete tensors are left out."""
    slices = compute_slices([(move.src, move.dst, move.name) for move in moves])
    missing = [slices.blocks[number].missing for number in slices.block_of]
    return {move.name: boxes for move, boxes in zip(moves, missing, strict=True) if boxes}


def _missing_error(move: TensorMove, missing: Sequence[Box], unasked: Sequence[str]) -> PlanError:
    """The error for boxes that no rank holds; ``unasked`` are the names that are given and not wanted."""
    cause = ""
    if not move.src.shards:
        nearest = difflib.get_close_matches(move.name, unasked, n=1)
        cause = "no rank gives elements of that name; " + (f"did you mean {nearest[0]!r}? " if nearest else "")
    listed = ", ".join(map(str, missing[:_MAX_LISTED])) + (", ..." if len(missing) > _MAX_LISTED else "")
    lost = sum(box.size for box in missing)
    return PlanError(
        f"planning the move of tensor {move.name!r}: {cause}{lost} of {Box.of_shape(move.dst.global_shape).size} "
        f"elements are wanted but held by no rank, in {len(missing)} boxes: {listed}; give these boxes on some rank, "
        "or fill them from a checkpoint"
    )


def travelling_dtype(held: str, wanted: str) -> str | None:
    """The dtype in which a tensor travels; None when a cast from ``held`` to ``wanted`` would lose its meaning.

    >>> travelling_dtype("float32", "bfloat16"), travelling_dtype("bfloat16", "float32")
    ('bfloat16', 'bfloat16')
    """
    if held == wanted:
        return held
    if not (_both(held, wanted, _FLOATS) or _both(held, wanted, _COMPLEX) or _has_room(held, wanted)):
        return None
    return wanted if itemsize_bytes(wanted) < itemsize_bytes(held) else held


def _both(a: str, b: str, kind: frozenset[str]) -> bool:
    return a in kind and b in kind


def _has_room(held: str, wanted: str) -> bool:
    wider = itemsize_bytes(wanted) > itemsize_bytes(held)
    if held in _UNSIGNED:
        return wider and wanted in (*_SIGNED, *_UNSIGNED)
    return wider and held in _SIGNED and wanted in _SIGNED


def stack_moves(moves: Sequence[TensorMove]) -> tuple[list[TensorMove], Alike]:
    """One move for all tensors that are alike, and which those are.

    >>> src, dst = (Layout((4,), (Shard(rank, Box((0,), (4,))),), "int8") for rank in (0, 1))
    >>> stacked, alike = stack_moves([TensorMove("v", src, dst), TensorMove("w", src, dst)])
    >>> stacked[0].src.global_shape, alike
    ((2, 4), {'v': ('v', 'w')})
    """
    same: dict[tuple[int, int], list[TensorMove]] = {}
    single = []
    for move in sorted(moves, key=lambda move: move.name):
        if move.src.partial is None:
            same.setdefault((id(move.src), id(move.dst)), []).append(move)
        else:
            single.append(move)
    stacked, alike = single, {}
    for several in same.values():
        first = several[0]
        if len(several) > 1:
            alike[first.name] = tuple(move.name for move in several)
            first = TensorMove(first.name, _stack(first.src, len(several)), _stack(first.dst, len(several)))
        stacked.append(first)
    return stacked, alike


def _stack(layout: Layout, number: int) -> Layout:
    boxes = [Box((0, *shard.box.start), (number, *shard.box.stop)) for shard in layout.shards]
    shards = tuple(Shard(shard.holder, box) for shard, box in zip(layout.shards, boxes, strict=True))
    return Layout((number, *layout.global_shape), shards, layout.dtype)


def unstack(names: Sequence[str], box: Box) -> tuple[Sequence[str], Box]:
    """The tensors that a box of a stack of these is in, and its box in each; of a single tensor the box itself.

    >>> unstack(["u", "v", "w"], Box((1, 5), (3, 9)))
    (['v', 'w'], Box((5,), (9,)))
    """
    if len(names) == 1:
        return names, box
    return names[box.start[0] : box.stop[0]], Box(box.start[1:], box.stop[1:])
