"""Recovery of a job's state: from peers' memory and snapshots, else from the last checkpoint.

1. every rank reports the steps that it can give, and under which names: from its own memory, and from snapshots on its
   node; where all hold the newest step, each just what its new place needs, each keeps its own, and nothing is planned;
2. steps are tried from the newest: if every wanted box has a holder then, its holders send and all ranks receive, by
   one reshard plan for all tensors;
3. a step at which some box has no holder is left out on all ranks alike, so that no rank mixes two steps; the last
   checkpoint comes in its place among the steps, after memory of the same step;
4. the newest step goes by windows, if the program has asked for them (`remesh.elasticity.training.window_fill`);
5. a job that has resolved no step yet begins anew, and so does one that lost a box before its first checkpoint could be
   there; any other ends with an error, since repeating its steps was not asked for.

*Lines.* A job that goes back makes some steps a second time, and not always to the same bits. So every state knows the
generation in which the job last began or went back, its line; holders of one step give together only if their lines are
one, and a later line comes first.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from remesh.checkpoint.plain import load_chosen
from remesh.checkpoint.plan.step_names import step_of
from remesh.checkpoint.run.housekeeping import latest_complete
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.storage import Location, location_of
from remesh.comm.gather import all_gather_json, group_rank, step_together
from remesh.elasticity.model.alike import describe_unlike
from remesh.elasticity.training.offers import Offers, keep_both
from remesh.elasticity.training.position import Position
from remesh.elasticity.training.window_fill import DOING, FillSource, fill_by_windows, report_lack_of_memory
from remesh.elasticity.training_state import POSITION, CarriedState, HeldState, Moment
from remesh.elasticity.typed_values import merge_values
from remesh.foundation.errors import ConfigError, StorageError
from remesh.layout.from_torch import Piece
from remesh.resharding.model.tasks import compute_missing_boxes
from remesh.resharding.planning.plan import Plan
from remesh.resharding.planning.planner import plan_reshard
from remesh.resharding.running.describe import describe_all, gather_moves, moves_of
from remesh.resharding.running.run import Moved, UnfilledError, run_plan
from remesh.resharding.running.telemetry import BytesByPair

_Pieces = dict[str, Piece]
logger = logging.getLogger(__name__)
_ALL_HELD = "every shard is held by a living rank"


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of a fill: its source, and the bytes from each rank."""

    position: Position
    source: str
    """``"peers"``, ``"snapshots"``, ``"checkpoint"`` or ``"fresh"``."""
    reason: str
    bytes_by_pair: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(giving rank, taking rank) -> bytes that went over the network, for all ranks; counted when looked at."""
    bytes_taken: Mapping[int, int] = field(default_factory=dict)
    """Giving rank -> bytes that this rank took from it over the network."""
    bytes_kept: int = 0
    """Bytes that ranks had in their own memory, over all ranks."""
    bytes_from_disk: int = 0
    """Bytes that this rank read from a checkpoint."""
    bound_bytes: int = 0
    """Bytes that no plan could have kept off the busiest host's network."""
    move_s: float = 0.0
    """How long this rank was at moving them."""
    num_windows: int = 0
    """In so many windows; 0 for all at once."""
    peak_bytes: int = 0
    """With windows: what this rank was planned to hold of the old and the new state at one time, at the most."""


@dataclass(frozen=True, slots=True)
class FillRules:
    """The sources that may serve besides memory; equal on all ranks."""

    checkpoint: Location | None = None
    """Folder or URL of the job's checkpoints."""
    save_every: int | None = None
    """Steps between two checkpoints; None: made only when asked."""
    line: int = 0
    """Of a job that goes back or begins now: the generation's number."""
    is_behind: bool = False
    """Whether the state in memory is of an earlier generation, so that a checkpoint may be newer."""
    known_step: int = 0
    """Batches that the job is known to have resolved, whether a rank holds them or not."""
    window_bytes: int | None = None
    """What a rank may make at a time, beside what it holds; None: all."""

    def may_begin_anew(self, step: int) -> bool:
        """Whether a job at this step need not have a checkpoint yet: the first is due, or on its way, at most."""
        if step == 0:
            return True
        return self.checkpoint is not None and self.save_every is not None and step < 2 * self.save_every


def fill_state(state: CarriedState, offers: Offers, host_of: Mapping[int, str], rules: FillRules) -> Filled:
    """Fill ``state`` on all ranks alike; every rank of the default group calls it, and blocks on the others."""
    # By windows nothing is made before it is known what moves.
    held = offers.held if rules.window_bytes is None else None
    find, tell = partial(_find_own, state, held), partial(_describe_rank, offers, state, rules)
    met = step_together(find, None, DOING, tell=tell, translate=report_lack_of_memory)
    everywhere = met.told
    _check_same_call([each["carries"] for each in everywhere])
    is_new = all(each["is_new"] for each in everywhere)
    state.is_new = False
    summaries = [summary for each in everywhere for summary in each["told"]]
    newest = max((_moment(each["told"][0]) for each in everywhere if each["in_memory"]), default=None)
    if met.mine is not None and not rules.is_behind and _do_all_stay(everywhere):
        return _keep_own(state, met.mine, everywhere)
    state.forget_allocated()
    reasons = [] if newest is not None else ["no rank alive holds state"]
    found = None if newest is not None and not rules.is_behind else _find_checkpoint(rules.checkpoint)
    for moment in sorted({_moment(summary) for summary in summaries}, reverse=True):
        step = moment.step
        if found is not None and _step_of_checkpoint(found) > step:
            continue
        at_step = [summary for summary in summaries if _moment(summary).has(moment)]
        names = frozenset(name for summary in at_step for name in summary["names"])
        is_newest = newest is not None and moment[:2] == newest[:2]
        values = _latest_values(at_step, state)
        line = moment.line if is_newest else rules.line
        reached = Position.from_text(step, int(at_step[0]["samples"]), line, values.get(POSITION))
        becomes = HeldState(step, reached.samples, {}, values, reached.line)
        if rules.window_bytes is not None and is_newest and not rules.is_behind:
            source = FillSource(offers, names, becomes, host_of, moment)
            if (by_windows := _fill_by_windows(state, source, reached, rules.window_bytes)) is not None:
                return by_windows
        make = partial(_make_sides, state, names, offers, moment)
        sides = step_together(make, None, DOING, tell=lambda made: describe_all(*made), translate=report_lack_of_memory)
        moves = moves_of(sides.told)
        missing = compute_missing_boxes(moves)
        if missing:
            name, boxes = min(missing.items())
            reasons.append(
                f"no rank alive holds box {boxes[0]} of {name!r} at step {step} ({len(missing)} tensors incomplete)"
            )
            # The disk is looked at only now: as long as memory serves, no rank waits for it.
            found = found or _find_checkpoint(rules.checkpoint)
            continue
        plan = plan_reshard(moves, host_of)
        state.is_torn = offers.held is not None and not offers.holds(moment)
        started_s = time.monotonic()
        moved = _move(state, plan, sides.mine, offers.held, becomes)
        move_s = time.monotonic() - started_s
        state.set_values(becomes.values)
        state.is_torn = False
        reasons.append(_ALL_HELD if is_newest else f"went back to the snapshots of step {step}")
        return Filled(
            reached,
            "peers" if is_newest else "snapshots",
            "; ".join(reasons),
            bytes_by_pair=moved.bytes_by_pair,
            bytes_taken=_bytes_taken(moved),
            bytes_kept=moved.bytes_local,
            bound_bytes=plan.lower_bound_bytes,
            move_s=move_s,
        )
    if found is not None:
        return _load_checkpoint(state, found, "; ".join(reasons), rules.line)
    num_lost = max([rules.known_step, *(int(summary["step"]) for summary in summaries)])
    if not (is_new and rules.may_begin_anew(num_lost)):
        raise _nothing_to_continue_from(reasons, rules, num_lost)
    return _begin_anew(state, reasons, rules.line, num_lost)


def _begin_anew(state: CarriedState, reasons: Sequence[str], line: int, num_lost: int) -> Filled:
    state.forget_allocated()
    met = step_together(state.prove, None, DOING, tell=lambda _: state.describe())
    state.check_alike(met.told)
    # Raises where ranks have another shape or dtype of a tensor. Only the next change of members would find it else.
    gather_moves({}, state.tensors())
    begins = "there is no checkpoint"
    if num_lost:
        begins = f"no checkpoint was due yet: the job begins anew, {num_lost} steps are lost"
    reason = f"{'; '.join(reasons)}, and {begins}"
    if num_lost and group_rank() == 0:
        logger.warning("%s: %s", DOING, reason)
    return Filled(Position(line=line), "fresh", reason)


def _nothing_to_continue_from(reasons: Sequence[str], rules: FillRules, num_lost: int) -> StorageError:
    root = rules.checkpoint
    found = "the job has no folder of checkpoints" if root is None else f"found no checkpoint in {root}"
    return StorageError(
        f"{DOING}: {'; '.join(reasons)}, and {found}; the job had come to step {num_lost} or later, expected a source "
        "to continue from; start it again to begin at step 0, and run it with checkpoint=... and save_every=..., with "
        "snapshot_every=..., or with replicas on more nodes"
    )


def _fill_by_windows(state: CarriedState, source: FillSource, reached: Position, window_bytes: int) -> Filled | None:
    started_s = time.monotonic()
    windows = fill_by_windows(state, source, window_bytes)
    if windows is None:
        return None
    state.set_values(source.becomes.values)
    state.is_torn = False
    move_s = time.monotonic() - started_s
    taken: Counter[int] = Counter()
    for one in windows.moved:
        taken.update(_bytes_taken(one))
    return Filled(
        reached,
        "peers",
        f"{_ALL_HELD}; moved in {len(windows.moved)} windows",
        bytes_by_pair=BytesByPair(lambda: windows.bytes_by_pair),
        bytes_taken=taken,
        bytes_kept=sum(one.bytes_local for one in windows.moved),
        bound_bytes=sum(one.lower_bound_bytes for one in windows.moved),
        move_s=move_s,
        num_windows=len(windows.moved),
        peak_bytes=windows.peak_bytes,
    )


def _make_sides(state: CarriedState, names: frozenset[str], offers: Offers, moment: Moment) -> tuple[_Pieces, _Pieces]:
    """What this rank gives of a step, and the memory that is to be filled."""
    state.allocate(names)
    state.check_made(names)
    return offers.at(moment), state.pieces()


def _move(
    state: CarriedState, plan: Plan, sides: tuple[_Pieces, _Pieces], held: HeldState | None, becomes: HeldState
) -> Moved:
    """Run the plan, and keep both sides if this rank cannot know whether it has ended for all."""
    give, take = sides
    try:
        return run_plan(plan, give, take, None)
    except UnfilledError as lost:
        if not lost.unfilled:
            before = {} if state.is_torn or held is None else held.pieces
            state.in_doubt = replace(becomes, pieces=keep_both(before, take))
        raise


def _find_own(state: CarriedState, held: HeldState | None) -> list[tuple[Piece, Piece]] | None:
    """What it takes and what it holds of each tensor, if the boxes are the same; None if they are not."""
    if held is None:
        return None
    state.allocate(held.pieces.keys())
    take = state.pieces()
    if take.keys() != held.pieces.keys():
        return None
    pairs = [(take[name], given) for name, given in held.pieces.items()]
    return pairs if all(itertools.starmap(_lie_alike, pairs)) else None


def _lie_alike(taken: Piece, given: Piece) -> bool:
    """Whether two local tensors are the same part of the same tensor, of whole values in one dtype."""
    return (
        (taken.global_shape, taken.shards, taken.partial) == (given.global_shape, given.shards, given.partial)
        and (taken.tensor.shape, taken.tensor.dtype) == (given.tensor.shape, given.tensor.dtype)
        and taken.partial is None
    )


def _check_same_call(by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise, on all ranks alike, for calls that differ: a rank would not get what it does not name."""
    unlike = describe_unlike(by_rank, lambda rank: f"rank {rank}")
    if unlike is not None:
        raise ConfigError(
            f"{DOING}: ranks call job.carry with different arguments: {unlike}; give all ranks the same, a module "
            "without parameters where a rank has no part in one"
        )


def _describe_rank(
    offers: Offers, state: CarriedState, rules: FillRules, own: Sequence[tuple[Piece, Piece]] | None
) -> dict[str, Any]:
    """The description of the state that this rank can give, for the others."""
    return {
        "in_memory": offers.held is not None,
        "told": [_summary(one) for one in (offers.held, *offers.snapshots) if one is not None],
        "is_new": state.is_new,
        "carries": {"window_bytes": rules.window_bytes, **state.kinds()},
        "own_bytes": None if own is None else sum(taken.tensor.nbytes for taken, _ in own),
    }


def _do_all_stay(everywhere: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks hold the newest step there is, each what it needs."""
    newest = max((_moment(summary) for each in everywhere for summary in each["told"]), default=None)
    return all(each["own_bytes"] is not None and _moment(each["told"][0]) == newest for each in everywhere)


def _keep_own(
    state: CarriedState, own: Sequence[tuple[Piece, Piece]], everywhere: Sequence[Mapping[str, Any]]
) -> Filled:
    """Every rank fills its objects from its own memory. No communication."""
    started_s = time.monotonic()
    for taken, given in own:
        taken.tensor.copy_(given.tensor)
    summary = everywhere[0]["told"][0]
    values = _latest_values([each["told"][0] for each in everywhere], state)
    state.set_values(values)
    line, step, _ = _moment(summary)
    return Filled(
        Position.from_text(step, int(summary["samples"]), line, values.get(POSITION)),
        "peers",
        "every rank holds what it needs",
        bytes_kept=sum(each["own_bytes"] for each in everywhere),
        move_s=time.monotonic() - started_s,
    )


def _bytes_taken(moved: Moved) -> Mapping[int, int]:
    taken: Counter[int] = Counter()
    for message in moved.taken:
        taken[message.giver] += message.nbytes
    return taken


def _step_of_checkpoint(path: str) -> int:
    step = step_of(location_of(path).name)
    assert step is not None
    return step


def _summary(held: HeldState) -> dict[str, Any]:
    names = sorted(held.pieces)
    return {"moment": held.moment, "step": held.step, "samples": held.samples, "names": names, "values": held.values}


def _moment(summary: Mapping[str, Any]) -> Moment:
    return Moment(*summary["moment"])


def _latest_values(summaries: Sequence[Mapping[str, Any]], state: CarriedState) -> dict[str, str]:
    """The plain values of the latest moment, and of others the values that no rank has of that.

    Behind a step, before the next call, ranks may have come to different places, in an evaluation perhaps: there the
    first one's are as good as another's. Anywhere else a difference is an error.
    """
    merged: dict[str, str] = {}
    for moment in sorted({_moment(summary) for summary in summaries}, reverse=True):
        here = [summary["values"] for summary in summaries if _moment(summary) == moment]
        is_behind_step = moment.mark == 0 and all(POSITION in values for values in here)
        apart = {name for values in here for name in values} if is_behind_step else {POSITION, *state.streams}
        merged = merge_values(here, apart) | merged
    return merged


def _find_checkpoint(root: Location | None) -> str | None:
    """The newest complete checkpoint as rank 0 sees it: another rank may look a moment before or after a commit."""
    found = latest_complete(root) if root is not None and group_rank() == 0 else None
    chosen: str | None = all_gather_json(None if found is None else str(found), None)[0]
    return chosen


def _load_checkpoint(state: CarriedState, chosen: str, reason: str, line: int) -> Filled:
    def choose(checkpoint: OpenCheckpoint) -> dict[str, Any]:
        state.allocate(checkpoint.manifest.tensors)
        state.check_made(checkpoint.manifest.tensors)
        return {**state.tensors(), "job": None}

    def begin() -> None:
        state.is_torn = True

    loaded = load_chosen(choose, chosen, before_filling=begin)
    values = loaded["job"]["values"]
    state.set_values(values)
    state.is_torn = False
    position = loaded["job"]["position"]
    return Filled(
        Position.from_text(int(position["step"]), int(position["samples"]), line, values.get(POSITION)),
        "checkpoint",
        f"{reason}; went back to {chosen}",
        bytes_from_disk=sum(piece.tensor.nbytes for piece in state.pieces().values()),
    )
