"""Recovery in windows, for a mesh that has no memory for two states: old shards are freed before more are made.

What can be made bit by bit are the moments of optimizers, and they are most of a state: a fresh optimizer makes those
of a few parameters at a time. The parameters themselves are there when the program hands over its model. In steps:

1. Ranks report what they hold of the step, what is there to be filled, and how large the parameters are whose moments
   are still to be made. Unless every box that may be wanted has a holder, nothing is done here: what is there is filled
   at once, or from a checkpoint.
2. The order of the windows keeps the peak low (`remesh.resharding.planning.window_order`): what is there already comes
   first, for it takes nothing and gives up its old shards.
3. In each window moments are made, and moved by an ordinary reshard. When all ranks have theirs the old shards are
   released; their memory is free once no other object refers to them.

Between two windows a rank holds old shards of some tensors and new ones of the others, all of one step. Should a rank
be lost then, this is what the others give: boxes are boxes, whichever mesh they were cut for. Gone is what the lost
rank alone had, as at any time after a fill; snapshots and checkpoints serve for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remesh.comm.gather import group_rank, lack_of_memory, step_together
from remesh.elasticity.training.offers import Offers, keep_both
from remesh.elasticity.training_state import CarriedState, HeldState, Moment
from remesh.foundation.errors import ConfigError
from remesh.layout import Box, Shard
from remesh.layout.dtypes import ITEMSIZE_BYTES
from remesh.layout.from_torch import Piece
from remesh.resharding.model.tasks import TensorMove, compute_missing_boxes
from remesh.resharding.planning.planner import plan_reshard
from remesh.resharding.planning.window_order import WindowPlan, plan_windows
from remesh.resharding.running.describe import describe_all, moves_of
from remesh.resharding.running.run import Moved, UnfilledError, run_plan

DOING = "filling the new mesh"


@dataclass(frozen=True, slots=True)
class FillSource:
    """The step that a mesh is filled with."""

    offers: Offers
    """What this rank gives."""
    names: frozenset[str]
    """Of all tensors that any rank holds of the step."""
    becomes: HeldState
    """What every rank has of it in the end, but for the tensors. Invariant: of the newest line and step."""
    host_of: Mapping[int, str]

    moment: Moment
    """Of what holders give."""


@dataclass(frozen=True, slots=True)
class FilledWindows:
    """A fill by windows that has come to its end."""

    moved: list[Moved] = field(default_factory=list)
    """By each window."""
    peak_bytes: int = 0
    """Most that this rank was planned to hold of the old and the new state at one time."""

    @property
    def bytes_by_pair(self) -> Mapping[tuple[int, int], int]:
        total: Counter[tuple[int, int]] = Counter()
        for one in self.moved:
            total.update(one.bytes_by_pair)
        return total


def fill_by_windows(state: CarriedState, source: FillSource, window_bytes: int) -> FilledWindows | None:
    """Fill ``state`` with a step, in windows in which no rank makes more than so many bytes, but for larger parameters.

    Called by every rank of the default group; blocks on the others. None, and nothing is changed, where windows cannot
    be planned. Raises as a fill at once does, on all ranks alike; then `CarriedState.in_doubt` is what this rank has.
    """
    met = step_together(lambda: _describe_rank(state, source), None, DOING, tell=lambda one: one)
    if any(each["is_strange"] for each in met.told):
        return None
    moves = {move.name: move for move in moves_of([each["described"] for each in met.told])}
    if compute_missing_boxes(list(moves.values())):
        return None
    units: dict[str, list[str]] = {}
    for name in sorted(source.names):
        units.setdefault(state.unit_of(name), []).append(name)
    plan = _plan(units, moves, met.told, window_bytes)
    held = source.offers.held
    if source.offers.holds(source.moment):
        assert held is not None
        kept = held.pieces
    else:
        kept = {}
        if held is not None:  # an earlier step, which no rank needs any more
            state.is_torn = True
            held.pieces.clear()
    filled = FilledWindows(peak_bytes=plan.peak_bytes[group_rank()] + state.num_bytes() if plan.windows else 0)
    for window in plan.windows:
        filled.moved.append(_move_window(state, source, units, window, kept))
    state.in_doubt = None
    return filled


def report_lack_of_memory(doing: str, raised: BaseException) -> BaseException:
    """The error of all ranks when one of them has no memory left; other errors are returned as they are."""
    found = lack_of_memory(raised)
    if found is None:
        return raised
    return ConfigError(
        f"{doing}: a rank has no memory left for its part of the state ({found}), expected room for it beside what the "
        "rank holds; it has not moved; let a mesh have more ranks, or the state fewer bytes, or carry it by windows "
        "(window_bytes)"
    )


def _describe_rank(state: CarriedState, source: FillSource) -> dict[str, Any]:
    """What this rank sends of itself before anything is planned."""
    boxes, there = source.offers.boxes_at(source.moment), state.pieces()
    is_strange = not there.keys() <= source.names or any(one.partial is not None for one in boxes.values())
    # Of what is still to be made every box may be wanted somewhere.
    makes = state.sizes_to_make(source.names)
    wholes = {name: _whole(piece) for name, piece in boxes.items() if state.unit_of(name) in makes}
    held = source.offers.held if source.offers.holds(source.moment) else None
    return {
        "is_strange": is_strange,
        "described": describe_all(boxes, there | wholes),
        "held": {name: piece.tensor.nbytes for name, piece in held.pieces.items()} if held is not None else {},
        "makes": makes,
    }


def _whole(piece: Piece) -> Piece:
    return replace(piece, shards=(Shard(0, Box.of_shape(piece.global_shape)),))


def _plan(
    units: Mapping[str, Sequence[str]],
    moves: Mapping[str, TensorMove],
    by_rank: Sequence[Mapping[str, Any]],
    window_bytes: int,
) -> WindowPlan:
    """Windows of what comes together, from what every rank gives up and makes of it."""

    def made(unit: str, name: str, each: Mapping[str, Any]) -> int:
        """Bytes of a tensor that a rank makes: as large a part as it has of the parameter, or all if it is no such."""
        if unit not in each["makes"] or name not in moves:
            return 0
        of_all, of_own = each["makes"][unit]
        size = math.prod(moves[name].dst.global_shape)
        return int(of_own if size == of_all else size) * ITEMSIZE_BYTES[moves[name].dst.dtype]

    sizes = {
        unit: (
            [sum(each["held"].get(name, 0) for name in names) for each in by_rank],
            [sum(made(unit, name, each) for name in names) for each in by_rank],
        )
        for unit, names in units.items()
    }
    return plan_windows(sizes, window_bytes)


def _move_window(
    state: CarriedState,
    source: FillSource,
    units: Mapping[str, Sequence[str]],
    window: Collection[str],
    kept: dict[str, Piece],
) -> Moved:
    """Make and move one window; ``kept``, what this rank has of the step, then has the new shards in the old ones'
    stead."""
    names = {name for unit in window for name in units[unit]}

    def make() -> tuple[dict[str, Piece], dict[str, Piece]]:
        state.make(window)
        state.check_made(names)
        return source.offers.at(source.moment, names), state.pieces(names)

    sides = step_together(make, None, DOING, tell=lambda made: describe_all(*made), translate=report_lack_of_memory)
    give, take = sides.mine
    plan = plan_reshard(moves_of(sides.told), source.host_of)
    try:
        moved = run_plan(plan, give, take, None)
    except UnfilledError as lost:
        if not lost.unfilled:  # others may have given up their old shards, or not
            kept |= keep_both({name: kept[name] for name in names & kept.keys()}, take)
            state.in_doubt = replace(source.becomes, pieces=kept)
        raise
    for name in names:
        kept.pop(name, None)
    kept |= take
    state.in_doubt = replace(source.becomes, pieces=kept)
    return moved
