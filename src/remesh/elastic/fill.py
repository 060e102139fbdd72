"""Where does the state come from? Fills carried objects from peers' memory, else from the last checkpoint.

1. every rank tells which step it holds, under which names;
2. the newest step's holders give, everybody takes: one reshard plan for all tensors;
3. if some wanted box has no living holder, nothing moves, and all ranks read the last checkpoint instead, so that
   no rank mixes two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remesh.dist_checkpointing import load_tensors_metadata
from remesh.dist_checkpointing.plain import latest_complete, load
from remesh.elastic.position import Position
from remesh.elastic.state import CarriedState, Held
from remesh.errors import StorageError
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
    """``"peers"``, ``"checkpoint"`` or ``"fresh"``."""
    reason: str
    bytes_by_pair: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(giving rank, taking rank) -> bytes that went over the network, for all ranks."""
    bytes_kept: int = 0
    """Bytes that ranks had in their own memory, over all ranks."""
    bytes_from_disk: int = 0
    """Bytes that this rank read from a checkpoint."""


def fill_state(
    state: CarriedState, held: Held | None, *, host_of: Mapping[int, str], checkpoint: Path | None
) -> Filled:
    """Fill ``state`` on all ranks alike; every rank of the default group calls it, and blocks on the others."""
    summaries = all_gather_json(_summary(held), None)
    holders = [summary for summary in summaries if summary is not None]
    if not holders:
        reason = "nobody alive holds state"
        found = _find_checkpoint(checkpoint)
        if found is None:
            return Filled(Position(), "fresh", f"{reason}, and there is no checkpoint")
        return _load_checkpoint(state, found, reason)
    newest = max(holders, key=lambda summary: int(summary["step"]))
    state.allocate(newest["names"])
    give = held.pieces if held is not None and held.step == newest["step"] else {}
    take = state.pieces()
    moves = gather_moves(give, take, None)
    missing = compute_missing_boxes(moves)
    if missing:
        name, boxes = min(missing.items())
        reason = f"nobody alive holds box {boxes[0]} of {name!r} ({len(missing)} tensors incomplete)"
        found = _find_checkpoint(checkpoint)
        if found is None:
            raise StorageError(
                f"filling the new mesh: {reason}, and there is no checkpoint in {checkpoint}; expected one to go back "
                "to; run with checkpoint=... and save_every=..., or use replicas"
            )
        return _load_checkpoint(state, found, reason)
    moved = run_plan(plan_reshard(moves, host_of), give, take, None)
    state.set_values(newest["values"])
    return Filled(
        Position(int(newest["step"]), int(newest["samples"])),
        "peers",
        "every box has a living holder",
        bytes_by_pair=moved.bytes_by_pair,
        bytes_kept=moved.bytes_local,
    )


def _summary(held: Held | None) -> dict[str, Any] | None:
    if held is None:
        return None
    return {"step": held.step, "samples": held.samples, "names": sorted(held.pieces), "values": held.values}


def _find_checkpoint(root: Path | None) -> str | None:
    """The newest complete checkpoint as rank 0 sees it: another rank may look a moment before or after a commit."""
    found = latest_complete(root) if root is not None and group_rank() == 0 else None
    chosen: str | None = all_gather_json(None if found is None else str(found), None)[0]
    return chosen


def _load_checkpoint(state: CarriedState, chosen: str, reason: str) -> Filled:
    state.allocate(load_tensors_metadata(chosen))
    tensors = state.tensors()
    loaded = load({**tensors, "job": None}, chosen)
    state.set_values(loaded["job"]["values"])
    position = loaded["job"]["position"]
    return Filled(
        Position(int(position["step"]), int(position["samples"])),
        "checkpoint",
        f"{reason}; went back to {chosen}",
        bytes_from_disk=sum(piece.tensor.nbytes for piece in state.pieces().values()),
    )
