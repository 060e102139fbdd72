"""Protection of a job's state against the loss of ranks: checkpoints, snapshots, and what is handed over.

One for each generation. Every method is called by all ranks, between two steps, and blocks on the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from remesh.checkpoint.plain import save
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.run.reader import is_complete
from remesh.checkpoint.storage import Location
from remesh.comm.gather import all_gather_json
from remesh.elasticity.snapshots.choice import SnapshotChoice, choose_boxes
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.place import JobOptions, RankPlace
from remesh.elasticity.training.position import Position
from remesh.elasticity.training_state import CarriedState, HeldState
from remesh.elasticity.typed_values import merge_values
from remesh.resharding.model.tasks import compute_missing_boxes
from remesh.resharding.reshard_api import gather_moves


class Safekeeping:
    """One rank's part in keeping the state."""

    def __init__(self, place: RankPlace, options: JobOptions, log: EventLog) -> None:
        self._place = place
        self._options = options
        self._log = log
        self._choice: SnapshotChoice | None = None
        self._num_chosen = 0
        """Tensors that there were when snapshots were last shared out."""
        self.is_any_rank_sending = False
        """Whether a rank reported at the last vote a snapshot that is not yet kept everywhere."""

    @property
    def is_sending(self) -> bool:
        """Whether this rank's last snapshot is not yet where it is to be kept."""
        return self._place.taker.is_busy

    def save(self, state: CarriedState, position: Position, values: Mapping[str, str], root: Location) -> Location:
        """A checkpoint of this step under ``root``; ``values`` are this rank's plain ones."""
        path = root / step_name(position.step)
        started_s = time.monotonic()
        # After a change of mesh the ranks may come here a second time for the same step; rank 0 looks for all.
        if not all_gather_json(self._place.rank == 0 and is_complete(path), None)[0]:
            where = {"step": position.step, "samples": position.samples}
            merged = merge_values(all_gather_json(values, None), state.streams)
            save({**state.tensors(), "job": {"values": merged, "position": where}}, path)
            seconds = time.monotonic() - started_s
            self._log.write("saved", step=position.step, path=str(path), seconds=seconds, rank=self._place.rank)
        return path

    def hand_over(self, state: CarriedState, position: Position, values: Mapping[str, str], is_leaving: bool) -> bool:
        """Save a checkpoint of this step if a rank that is about to leave is the only holder of some box.

        Whether the job loses nothing without those that leave.
        """
        mine = state.pieces()
        stays, leaves = ({}, mine) if is_leaving else (mine, {})
        missing = compute_missing_boxes(gather_moves(stays, leaves, None))
        self._log_event("hand-over", position.step, num_tensors=len(missing))
        root = self._options.checkpoint
        if missing and root is not None:
            self.save(state, position, values, root)
        return not missing or root is not None

    def is_snapshot_due(self, step: int) -> bool:
        """The same on all ranks: it depends on the step and on the last vote only.

        Where the last one is not yet kept everywhere it goes first: a rank that could not send it tries again.
        """
        every = self._options.snapshot_every
        if not every or not step or step % every:
            return False
        if self.is_any_rank_sending:
            self._log_event("snapshot-left-out", step, reason="the last one is not yet kept everywhere")
            self._place.taker.send_again()
        return not self.is_any_rank_sending

    def take_snapshot(self, held: HeldState) -> None:
        """Copy this rank's share of the state into shared memory; blocks shortly on the others."""
        place = self._place
        # Optimizers make their moments at their first step: then the boxes are shared out anew.
        if any(all_gather_json(len(held.pieces) != self._num_chosen, None)):
            node_of = {member.rank: member.node for member in place.plan.members}
            self._choice = choose_boxes(gather_moves(held.pieces, held.pieces), place.rank, node_of)
            self._num_chosen = len(held.pieces)
            num_boxes = sum(map(len, self._choice.boxes.values()))
            self._log_event("snapshots-shared-out", held.step, num_boxes=num_boxes, reason=self._choice.reason)
        assert self._choice is not None
        seconds = place.taker.take(held, self._choice, os.getpid())
        self._log_event("snapshot", held.step, seconds=seconds)

    def _log_event(self, kind: str, step: int, **values: Any) -> None:
        place = self._place
        self._log.write(kind, step=step, generation=place.plan.number, rank=place.rank, **values)
