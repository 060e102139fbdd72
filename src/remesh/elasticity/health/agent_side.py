"""Agent's shell around :class:`HealthMachine`: it reads the store and workers' messages, and shares busy times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from remesh.elasticity.health.health_machine import HealthMachine, HealthView
from remesh.elasticity.health.straggler_pace import Pace, PaceJudge
from remesh.elasticity.health.verdicts import RankStack, find_stragglers
from remesh.elasticity.membership.instructions import Instruction, StragglerFound
from remesh.elasticity.model.generation import Generation
from remesh.elasticity.store.shared import JobStore
from remesh.elasticity.telemetry.events import EventLog

POLL_INTERVAL_S = 0.25
PACE_INTERVAL_S = 2.0
"""How often busy times are shared and compared."""


@dataclass(frozen=True, slots=True)
class PaceReport:
    """A worker's report that it made steps."""

    slot: int
    generation: int
    busy_s: float | None
    """Busy time per step since its last report; None for its first step."""
    step: int


@dataclass(frozen=True, slots=True)
class StackReport:
    """A worker's report of the stack of its program."""

    slot: int
    generation: int
    stack: RankStack
    """Without rank and node: the agent knows them better than the worker does."""


HealthReport = PaceReport | StackReport


class HealthWatch:
    """One agent's health duties. ``perform`` carries out instructions."""

    def __init__(
        self,
        machine: HealthMachine,
        paces: PaceJudge,
        store: JobStore,
        log: EventLog,
        perform: Callable[[Sequence[Instruction]], None],
    ) -> None:
        self._machine = machine
        self._judge = paces
        self._store = store
        self._log = log
        self._perform = perform
        self._plan: Generation | None = None
        self._paces: dict[int, Pace] = {}
        """By rank, of this node's workers in this generation."""
        self._has_learned = False
        """Whether this agent learned in this generation that one of its workers is too slow."""
        self._next_poll_s = 0.0
        self._next_pace_s = 0.0
        self._stragglers: frozenset[int] = frozenset()

    def begin(self, plan: Generation) -> None:
        """This node's workers enter a generation."""
        self._plan = plan
        self._paces.clear()
        self._stragglers = frozenset()
        self._has_learned = False
        self._judge.begin()
        self._machine.begin(plan, time.monotonic())

    def restart(self) -> None:
        """Another store is in force: questions and answers in the old one are void."""
        self._machine.restart(time.monotonic())

    def take(self, report: HealthReport) -> None:
        """Take a worker's report of its steps or of its stack."""
        plan = self._plan
        if plan is None or report.generation != plan.number:
            return
        ranks = {member.slot: member.rank for member in plan.of_node(self._machine.index)}
        if report.slot not in ranks:
            return
        rank = ranks[report.slot]
        if isinstance(report, StackReport):
            self._machine.answered(report.slot, replace(report.stack, rank=rank, node=self._machine.index))
            return
        self._machine.progressed(time.monotonic())
        if report.busy_s is not None:
            self._paces[rank] = Pace(report.busy_s, report.step)

    def poll(self) -> StragglerFound | None:
        """Do what is due; called often. Returns the straggler that the membership is to know of, if one was found."""
        now_s = time.monotonic()
        if self._plan is None or now_s < self._next_poll_s:
            return None
        self._next_poll_s = now_s + POLL_INTERVAL_S
        self._perform(self._machine.poll(self._read_view(self._plan), now_s))
        if now_s < self._next_pace_s:
            return None
        self._next_pace_s = now_s + PACE_INTERVAL_S
        self._compare_paces(self._plan)
        return self._read_verdict(self._plan) if self._judge.is_on else None

    def _read_view(self, plan: Generation) -> HealthView:
        stuck = self._store.get(f"gen/{plan.number}/stuck")
        if stuck is None:
            return HealthView(None, {}, None)
        stacks = {
            member.node: value["stacks"]
            for member in plan.members
            if (value := self._store.get(f"gen/{plan.number}/stacks/{member.node}")) is not None
        }
        return HealthView(str(stuck["text"]), stacks, self._store.get(f"gen/{plan.number}/culprits"))

    def _compare_paces(self, plan: Generation) -> None:
        """Publish how busy this node's ranks are; the first node compares those of all nodes."""
        if self._paces:
            mine = {str(rank): [pace.busy_s, pace.step] for rank, pace in self._paces.items()}
            self._store.put(f"gen/{plan.number}/pace/{self._machine.index}", mine)
        nodes = {member.node for member in plan.members}
        if self._machine.index != min(nodes):
            return
        everywhere: dict[int, Pace] = {}
        for node in nodes:
            published = self._store.get(f"gen/{plan.number}/pace/{node}") or {}
            everywhere |= {int(rank): Pace(float(busy_s), int(step)) for rank, (busy_s, step) in published.items()}
        if (slow := self._judge.compare(everywhere)) is not None:
            self._store.put_once(f"gen/{plan.number}/slow", asdict(slow))
        found = find_stragglers({rank: pace.busy_s for rank, pace in everywhere.items()})
        if frozenset(one.rank for one in found) != self._stragglers:
            self._stragglers = frozenset(one.rank for one in found)
            for one in found:
                self._log.write("straggler", generation=plan.number, **asdict(one))

    def _read_verdict(self, plan: Generation) -> StragglerFound | None:
        """The first node's verdict on a worker of this node, once."""
        published = None if self._has_learned else self._store.get(f"gen/{plan.number}/slow")
        ranks = {member.rank for member in plan.of_node(self._machine.index)}
        if published is None or int(published["rank"]) not in ranks - {-1}:
            return None
        self._has_learned = True
        return StragglerFound(plan.number, int(published["rank"]), float(published["ratio"]), str(published["reason"]))
