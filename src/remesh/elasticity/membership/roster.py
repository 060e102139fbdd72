"""Roster of a node's workers: the state of each slot, and the report on them to a meeting.

A worker is known by its slot, and by its process: a slot whose process died gets another one. Two kinds of processes
come to a meeting under a reservation: those *left behind*, whose state belongs to a generation that the others left
without them, and *slow* ones, which hold off until a time of this node's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remesh.elasticity.model.generation import Generation, WorkerReport
from remesh.elasticity.model.mesh_policy import Template


class WorkerState(enum.Enum):
    """The state of one worker of this agent."""

    STARTING = "starting"
    """The process is up but has not connected."""
    IDLE = "idle"
    """Between generations, or on standby."""
    TRAINING = "training"
    DONE = "done"
    """Its training function returned; it waits for the others."""
    DEAD = "dead"


@dataclass
class Occupant:
    """The worker in a slot."""

    state: WorkerState = WorkerState.STARTING
    report: WorkerReport | None = None
    """Its last report; None before the first."""


@dataclass
class Roster:
    """This node's workers, by slot."""

    workers: dict[int, Occupant] = field(default_factory=dict)
    left_behind: set[int] = field(default_factory=set)
    """Processes here whose state belongs to a generation that the others left without them."""
    slow_until_s: dict[int, float] = field(default_factory=dict)
    """Processes that are to be left out for being slow, and until when."""
    indispensable: set[int] = field(default_factory=set)
    """Slow processes that could not hand on what they hold: they are not asked again."""
    _known_step: int = 0
    """Batches that workers of this node have resolved, those that are gone too."""

    def take(self, state: WorkerState, report: WorkerReport) -> None:
        """Take the report of a worker, with the state that it is in now."""
        self.workers[report.slot] = Occupant(state, report)
        self.note_step(report.step or 0)

    def note_step(self, step: int) -> None:
        """A worker has resolved so many batches."""
        self._known_step = max(self._known_step, step)

    def lose(self, slot: int) -> bool:
        """Note that a process ended; returns whether it had connected."""
        worker = self.workers[slot]
        had_called_in = worker.report is not None
        worker.state, worker.report = WorkerState.DEAD, None
        return had_called_in

    def reports(self) -> tuple[WorkerReport, ...]:
        """The reports of this node to a rendezvous."""
        states = (WorkerState.IDLE, WorkerState.DONE)
        found = (worker.report for worker in self.workers.values() if worker.report and worker.state in states)
        return tuple(self._with_reservations(report) for report in found)

    def alive(self) -> Mapping[int, Occupant]:
        """The workers whose process is alive, as far as is known."""
        return {slot: worker for slot, worker in self.workers.items() if worker.state is not WorkerState.DEAD}

    def template(self) -> Template | None:
        """The mesh template of this node's workers; None before one has connected."""
        reports = (worker.report for worker in self.workers.values())
        return next((Template.from_json(report.template) for report in reports if report), None)

    def training(self) -> list[int]:
        """Slots of those that are in a generation."""
        return [slot for slot, worker in self.workers.items() if worker.state is WorkerState.TRAINING]

    def unsaved(self) -> list[int]:
        """Slots of workers that may hold what is nowhere else: they train, or are out and have not handed it over."""
        found = self.training()
        for slot, worker in self.workers.items():
            report = worker.report if worker.state is WorkerState.IDLE else None
            if report is not None and report.step is not None and not report.is_dispensable:
                found.append(slot)
        return found

    def process_in(self, slot: int) -> int | None:
        """The process that connected from a slot; None when there is none."""
        report = self.workers[slot].report
        return None if report is None else report.pid

    def newcomers(self, plan: Generation, node: int) -> list[int]:
        """Slots whose process is not in a generation, and wants to be."""
        known = {(member.slot, member.pid) for member in plan.of_node(node)}
        called = {slot: worker.report.pid for slot, worker in self.alive().items() if worker.report}
        return [slot for slot, pid in called.items() if (slot, pid) not in known]

    def take_rested(self, now_s: float) -> list[int]:
        """Slots of slow processes whose time is over; they are as good as the others from now on."""
        over = {pid for pid, until_s in self.slow_until_s.items() if now_s >= until_s}
        for pid in over:
            del self.slow_until_s[pid]
        return [slot for slot in self.alive() if self.process_in(slot) in over]

    def _with_reservations(self, report: WorkerReport) -> WorkerReport:
        report = replace(report, known_step=self._known_step)
        if report.pid in self.left_behind:
            report = replace(report, step=None, in_doubt=False)
        return replace(report, is_slow=True) if report.pid in self.slow_until_s else report
