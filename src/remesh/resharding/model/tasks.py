"""Unit tasks of a move: slices of tensors, with all ranks that can give them and all that want them.

Definitions. A *move* takes one tensor from the layout that is to the layout that is wanted. A *unit task* is one
slice of the common refinement of the two: its *givers* hold all of it, its *takers* want all of it. A taker that
is a giver copies inside its own memory; only the other takers (those that are not `UnitTask.copiers`) cause traffic.

Algorithm, for each move:

1. Refine the two layouts into slices (`remesh.resharding.model.slices`). Moves that share their layouts, as parameters
   and optimizer moments do, are refined once.
2. Count the elements: slices are disjoint, so if they add up to what is wanted, nothing is missing. Otherwise name the
   boxes that no rank holds.

Source: Zhuang et al., arXiv 2211.05322, appendix B.2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout
from remesh.resharding.model.casts import travelling_dtype
from remesh.resharding.model.slices import Slices, compute_slices

_MAX_LISTED = 4


class Missing(Enum):
    """The treatment of wanted boxes that no rank holds."""

    REFUSE = "refuse"
    """Raise `PlanError`."""
    LEAVE = "leave"
    """Move the rest; the takers' elements in those boxes keep their values."""


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

    Two dtypes that can be cast are both replaced by the one that travels (`remesh.resharding.model.casts`): plans know
    no other; a rank with another one casts at its own memory. Partial sums keep theirs until they are summed."""

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


@dataclass(frozen=True, slots=True)
class UnitTask:
    """One slice, who can send it, who wants it."""

    tensor: str
    """Name of the tensor."""
    box: Box
    """The slice, in global indices. Invariant: not empty; disjoint from the tensor's other tasks."""
    givers: tuple[int, ...]
    """Ranks that hold all of it, ascending. Invariant: at least one."""
    takers: tuple[int, ...]
    """Ranks that want all of it, ascending. Invariant: at least one; may share ranks with ``givers``."""
    nbytes: int
    """Size of the slice in bytes."""

    @property
    def copiers(self) -> tuple[int, ...]:
        """Takers that hold it themselves and copy it within their memory, ascending."""
        return tuple(rank for rank in self.takers if rank in self.givers)


def slices_of(moves: Sequence[TensorMove], missing: Missing = Missing.REFUSE) -> Slices:
    """The slices of all moves.

    Raises `PlanError` naming tensor and boxes when something wanted is held by nobody, unless it may be left.
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


def compute_tasks(moves: Sequence[TensorMove], missing: Missing = Missing.REFUSE) -> tuple[UnitTask, ...]:
    """The unit tasks of all moves, in the order of the moves.

    Raises `PlanError` naming tensor and boxes when something wanted is held by nobody, unless it may be left.
    """
    return tuple(_tasks_of(moves, slices_of(moves, missing)))


def _tasks_of(moves: Sequence[TensorMove], slices: Slices) -> Iterator[UnitTask]:
    sets = slices.rank_sets
    for move, number in zip(moves, slices.block_of, strict=True):
        block, itemsize = slices.blocks[number], move.src.itemsize_bytes
        columns = (block.starts, block.stops, block.sizes, block.givers, block.takers)
        for start, stop, size, givers, takers in zip(*(column.tolist() for column in columns), strict=True):
            yield UnitTask(move.name, Box(tuple(start), tuple(stop)), sets[givers], sets[takers], size * itemsize)


def compute_missing_boxes(moves: Sequence[TensorMove]) -> dict[str, tuple[Box, ...]]:
    """The disjoint boxes of each tensor that are wanted and held by no rank; complete tensors are left out."""
    slices = compute_slices([(move.src, move.dst, move.name) for move in moves])
    missing = [slices.blocks[number].missing for number in slices.block_of]
    return {move.name: boxes for move, boxes in zip(moves, missing, strict=True) if boxes}


def _missing_error(move: TensorMove, missing: Sequence[Box], unasked: Sequence[str]) -> PlanError:
    """The error for boxes that nobody holds; ``unasked`` are the names that are given and not wanted."""
    cause = ""
    if not move.src.shards:
        nearest = difflib.get_close_matches(move.name, unasked, n=1)
        cause = "no rank gives elements of that name; " + (f"did you mean {nearest[0]!r}? " if nearest else "")
    listed = ", ".join(map(str, missing[:_MAX_LISTED])) + (", ..." if len(missing) > _MAX_LISTED else "")
    lost = sum(box.size for box in missing)
    return PlanError(
        f"planning the move of tensor {move.name!r}: {cause}{lost} of {Box.of_shape(move.dst.global_shape).size} "
        f"elements are wanted but held by nobody, in {len(missing)} boxes: {listed}; give these boxes on some rank, or "
        "fill them from a checkpoint"
    )
