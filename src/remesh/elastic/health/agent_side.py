"""The agent's shell around :class:`HealthMachine`: reads the store and workers' messages, shares busy times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from remesh.elastic.events import EventLog
from remesh.elastic.generation import Generation
from remesh.elastic.health.machine import HealthMachine, HealthView, stack_from_worker
from remesh.elastic.health.verdicts import find_stragglers
from remesh.elastic.membership.instructions import Instruction
from remesh.elastic.store.shared import JobStore

POLL_INTERVAL_S = 0.25
PACE_INTERVAL_S = 2.0
"""How often busy times are shared and compared."""


class HealthWatch:
    """One agent's health duties. ``perform`` carries out instructions."""

    def __init__(
        self, machine: HealthMachine, store: JobStore, log: EventLog, perform: Callable[[Sequence[Instruction]], None]
    ) -> None:
        self._machine = machine
        self._store = store
        self._log = log
        self._perform = perform
        self._plan: Generation | None = None
        self._busy_s: dict[int, float] = {}
        """Rank -> busy time per step, of this node's workers in this generation."""
        self._next_poll_s = 0.0
        self._next_pace_s = 0.0
        self._stragglers: frozenset[int] = frozenset()

    def begin(self, plan: Generation) -> None:
        """This node's workers enter a generation."""
        self._plan = plan
        self._busy_s.clear()
        self._stragglers = frozenset()
        self._machine.begin(plan, time.monotonic())

    def restart(self) -> None:
        """Another store is in force: what was asked and told in the old one is void."""
        self._machine.restart(time.monotonic())

    def take(self, message: dict[str, Any]) -> None:
        """A worker tells that it made a step, or where it stands."""
        plan = self._plan
        if plan is None or message["generation"] != plan.number:
            return
        slot = int(message["slot"])
        ranks = {member.slot: member.rank for member in plan.of_node(self._machine.index)}
        if message["say"] == "progress":
            self._machine.progressed(time.monotonic())
            if message["busy_s"] is not None:
                self._busy_s[ranks[slot]] = float(message["busy_s"])
        elif slot in ranks:
            stack = stack_from_worker(message["stack"], rank=ranks[slot], node=self._machine.index)
            self._machine.answered(slot, stack)

    def poll(self) -> None:
        """Do what is due; called often."""
        now_s = time.monotonic()
        if self._plan is None or now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_INTERVAL_S
        self._perform(self._machine.poll(self._read_view(self._plan), now_s))
        if now_s >= self._next_pace_s:
            self._next_pace_s = now_s + PACE_INTERVAL_S
            self._compare_paces(self._plan)

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
        """Tell the others how busy our ranks are; the first node compares all."""
        if self._busy_s:
            busy = {str(rank): value for rank, value in self._busy_s.items()}
            self._store.put(f"gen/{plan.number}/pace/{self._machine.index}", busy)
        nodes = {member.node for member in plan.members}
        if self._machine.index != min(nodes):
            return
        everywhere: dict[int, float] = {}
        for node in nodes:
            told = self._store.get(f"gen/{plan.number}/pace/{node}") or {}
            everywhere |= {int(rank): float(value) for rank, value in told.items()}
        found = find_stragglers(everywhere)
        if frozenset(one.rank for one in found) != self._stragglers:
            self._stragglers = frozenset(one.rank for one in found)
            for one in found:
                self._log.write(
                    "straggler",
                    generation=plan.number,
                    rank=one.rank,
                    score=one.score,
                    ratio=one.ratio,
                    reason=one.reason,
                )
