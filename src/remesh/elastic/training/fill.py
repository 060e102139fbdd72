"""Where does the state come from? Fills carried objects from peers' memory, snapshots, else from the last checkpoint.

1. every rank tells at which steps it can give, under which names: from its own memory, and from snapshots on its node;
2. steps are tried from the newest: if every wanted box has a holder then, its holders give and everybody takes, by one
   reshard plan for all tensors;
3. a step at which some box has no holder is left out on all ranks alike, so that no rank mixes two steps; the last
   checkpoint comes in its place among the steps, after memory of the same step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remesh.dist_checkpointing import load_tensors_metadata
from remesh.dist_checkpointing.plain import latest_complete, load, step_of
from remesh.dist_checkpointing.storage import Location, location_of
from remesh.elastic.state import CarriedState, Held
from remesh.elastic.training.position import Position
from remesh.errors import StorageError
from remesh.layout.from_torch import Piece
from remesh.reshard.api import gather_moves
from remesh.reshard.model.tasks import compute_missing_boxes
from remesh.reshard.planning.planner import plan_reshard
from remesh.reshard.running.exchange import all_gather_json, group_rank
from remesh.reshard.running.run import run_plan


@dataclass(frozen=True, slots=True)
class Filled:
    """What was filled, and from where."""

    position: Position
    source: str
    """``"peers"``, ``"snapshots"``, ``"checkpoint"`` or ``"fresh"``."""
    reason: str
    bytes_by_pair: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(giving rank, taking rank) -> bytes that went over the network, for all ranks."""
    bytes_kept: int = 0
    """Bytes that ranks had in their own memory, over all ranks."""
    bytes_from_disk: int = 0
    """Bytes that this rank read from a checkpoint."""
    bound_bytes: int = 0
    """Bytes that no plan could have kept off the busiest host's network."""
    move_s: float = 0.0
    """How long this rank was at moving them."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What one rank can give."""

    held: Held | None
    """The state in its own memory, if it belongs to a step."""
    snapshots: tuple[Held, ...] = ()
    """Snapshots in its node's memory, its own and others'."""

    def at(self, step: int) -> dict[str, Piece]:
        """Everything of this step, by tensor."""
        found: dict[str, list[Piece]] = {}
        for one in (self.held, *self.snapshots):
            if one is not None and one.step == step:
                for name, piece in one.pieces.items():
                    found.setdefault(name, []).append(piece)
        return {name: join_pieces(pieces) for name, pieces in found.items()}


def fill_state(
    state: CarriedState,
    offers: Offers,
    *,
    host_of: Mapping[int, str],
    checkpoint: Location | None,
    is_behind: bool = False,
) -> Filled:
    """Fill ``state`` on all ranks alike; every rank of the default group calls it, and blocks on the others.

    ``is_behind`` says that the state in memory is of an earlier stay, so that a checkpoint may be newer.
    """
    told = [_summary(one) for one in (offers.held, *offers.snapshots) if one is not None]
    everywhere = all_gather_json({"in_memory": offers.held is not None, "told": told}, None)
    summaries = [summary for each in everywhere for summary in each["told"]]
    in_memory = [int(each["told"][0]["step"]) for each in everywhere if each["in_memory"]]
    newest = max(in_memory, default=-1)
    reasons = [] if in_memory else ["nobody alive holds state"]
    found = None if in_memory and not is_behind else _find_checkpoint(checkpoint)
    for step in sorted({int(summary["step"]) for summary in summaries}, reverse=True):
        if found is not None and _step_of_checkpoint(found) > step:
            break
        at_step = [summary for summary in summaries if summary["step"] == step]
        state.allocate({name: None for summary in at_step for name in summary["names"]})
        give, take = offers.at(step), state.pieces()
        moves = gather_moves(give, take, None)
        missing = compute_missing_boxes(moves)
        if missing:
            name, boxes = min(missing.items())
            reasons.append(
                f"nobody alive holds box {boxes[0]} of {name!r} at step {step} ({len(missing)} tensors incomplete)"
            )
            # The disk is looked at only now: as long as memory serves, nobody waits for it.
            found = found or _find_checkpoint(checkpoint)
            continue
        plan = plan_reshard(moves, host_of)
        state.is_torn = offers.held is not None and offers.held.step != step
        started_s = time.monotonic()
        moved = run_plan(plan, give, take, None)
        move_s = time.monotonic() - started_s
        state.set_values(at_step[0]["values"])
        state.is_torn = False
        is_newest = step == newest
        reasons.append("every box has a living holder" if is_newest else f"went back to the snapshots of step {step}")
        return Filled(
            Position(step, int(at_step[0]["samples"])),
            "peers" if is_newest else "snapshots",
            "; ".join(reasons),
            bytes_by_pair=moved.bytes_by_pair,
            bytes_kept=moved.bytes_local,
            bound_bytes=plan.lower_bound_bytes,
            move_s=move_s,
        )
    if found is not None:
        return _load_checkpoint(state, found, "; ".join(reasons))
    if in_memory:
        raise StorageError(
            f"filling the new mesh: {'; '.join(reasons)}, and there is no checkpoint in {checkpoint}; expected one "
            "to go back to; run with checkpoint=... and save_every=..., with snapshot_every=..., or use replicas"
        )
    return Filled(Position(), "fresh", f"{'; '.join(reasons)}, and there is no checkpoint")


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """One piece that gives what several give of one tensor, one after another in one buffer."""
    if len(pieces) == 1:
        return pieces[0]
    flat = torch.cat([piece.tensor.reshape(-1) for piece in pieces])
    shards, start, seen = [], 0, set()
    for piece in pieces:
        for shard in piece.shards:
            if (shard.box, shard.addend) not in seen:
                shards.append(replace(shard, offset=shard.offset + start))
                seen.add((shard.box, shard.addend))
        start += piece.tensor.numel()
    return Piece(flat, pieces[0].global_shape, tuple(shards), pieces[0].partial)


def _step_of_checkpoint(path: str) -> int:
    step = step_of(location_of(path).name)
    assert step is not None
    return step


def _summary(held: Held) -> dict[str, Any]:
    return {"step": held.step, "samples": held.samples, "names": sorted(held.pieces), "values": held.values}


def _find_checkpoint(root: Location | None) -> str | None:
    """The newest complete checkpoint as rank 0 sees it: another rank may look a moment before or after a commit."""
    found = latest_complete(root) if root is not None and group_rank() == 0 else None
    chosen: str | None = all_gather_json(None if found is None else str(found), None)[0]
    return chosen


def _load_checkpoint(state: CarriedState, chosen: str, reason: str) -> Filled:
    state.allocate(load_tensors_metadata(chosen))
    tensors = state.tensors()
    state.is_torn = True
    loaded = load({**tensors, "job": None}, chosen)
    state.set_values(loaded["job"]["values"])
    state.is_torn = False
    position = loaded["job"]["position"]
    return Filled(
        Position(int(position["step"]), int(position["samples"])),
        "checkpoint",
        f"{reason}; went back to {chosen}",
        bytes_from_disk=sum(piece.tensor.nbytes for piece in state.pieces().values()),
    )
