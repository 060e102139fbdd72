"""State machine of hang detection: when an agent asks for stacks, and what follows. Facts in, instructions out.

    gen/<n>/stuck        a node's workers made no step for too long; set once
    gen/<n>/stacks/<i>   the stacks of node i's workers
    gen/<n>/culprits     the verdict of the generation's first node; set once

    QUIET --no step for hang_timeout_s: set stuck--> (any node's stuck seen) ASKING --all answered, or 3 s--> ANSWERED
    ANSWERED, first node: all nodes' stacks there, or 10 s --> culprits
    culprits seen: each node kills its own; the rest is a death like any other

One report is made per generation. Time comes with every call.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh.elasticity.health.verdicts import RankStack, decide_culprits, format_report
from remesh.elasticity.membership.instructions import Instruction, KillWorker, Note, Publish, Tell
from remesh.elasticity.model.generation import Generation

ANSWER_TIMEOUT_S = 3.0
"""How long a worker may take to report its stack."""
NODES_TIMEOUT_S = 10.0
"""How long the first node waits for the others' stacks."""


class _HangDeed(enum.Enum):
    """What an agent does at most once about the hang of a generation, in this order."""

    TELL_STUCK = "publish that its workers made no step for too long"
    TELL_STACKS = "publish the stacks of its workers"
    JUDGE = "decide which ranks hang, as the first node"
    KILL = "kill those of its workers that hang"


@dataclass(frozen=True, slots=True)
class HealthView:
    """What the store has of the present generation's hang, if there is one."""

    stuck: str | None
    stacks: Mapping[int, Sequence[Mapping[str, Any]]]
    """Node index -> its workers' stacks."""
    culprits: Mapping[str, Any] | None


@dataclass
class HealthMachine:
    """One agent's part in finding the ranks that hang."""

    index: int
    hang_timeout_s: float
    _generation: Generation | None = None
    _progress_s: float = 0.0
    """When one of this node's workers last made a step."""
    _asked_s: float | None = None
    _answers: dict[int, RankStack] = field(default_factory=dict)
    """Slot -> the stack that its worker reported."""
    _done: set[_HangDeed] = field(default_factory=set)

    def begin(self, generation: Generation, now_s: float) -> None:
        """A new generation runs: all that was known is over."""
        if self._generation is None or generation.number != self._generation.number:
            self._generation = generation
            self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """Forget all questions and answers."""
        self._progress_s, self._asked_s = now_s, None
        self._answers.clear()
        self._done.clear()

    def progressed(self, now_s: float) -> None:
        """One of this node's workers made a step."""
        self._progress_s = now_s

    def answered(self, slot: int, stack: RankStack) -> None:
        """Take the stack that a worker reported."""
        self._answers[slot] = stack

    def poll(self, view: HealthView, now_s: float) -> list[Instruction]:
        """The instructions that are due now."""
        plan = self._generation
        mine = self._slots()
        if plan is None or not mine:
            return []
        if view.stuck is None:
            idle_s = now_s - self._progress_s
            if idle_s <= self.hang_timeout_s or not self._first(_HangDeed.TELL_STUCK):
                return []
            text = f"no worker of {plan.hosts[self.index]} made a step for {idle_s:.1f} s"
            return [Publish(f"gen/{plan.number}/stuck", {"text": text})]
        if self._asked_s is None:
            self._asked_s = now_s
            return [Tell(slot, {"type": "stacks", "generation": plan.number}) for slot in mine]
        if view.culprits is not None:
            return self._act_on(view.culprits)
        waited_s = now_s - self._asked_s
        out: list[Instruction] = []
        if (mine.keys() <= self._answers.keys() or waited_s > ANSWER_TIMEOUT_S) and self._first(_HangDeed.TELL_STACKS):
            stacks = [self._answers.get(slot, self._silent(slot, rank)).to_json() for slot, rank in mine.items()]
            out.append(Publish(f"gen/{plan.number}/stacks/{self.index}", {"stacks": stacks}))
        is_first = self.index == min(member.node for member in plan.members)
        all_there = {member.node for member in plan.members} <= view.stacks.keys()
        if is_first and (all_there or waited_s > NODES_TIMEOUT_S) and self._first(_HangDeed.JUDGE):
            out += self._judge(view, plan)
        return out

    def _judge(self, view: HealthView, plan: Generation) -> list[Instruction]:
        reported = [RankStack.from_json(one) for stacks in view.stacks.values() for one in stacks]
        known = {one.rank for one in reported}
        silent = [
            RankStack(member.rank, member.node, member.slot, -1, "", "", "")
            for member in plan.members
            if member.rank not in known
        ]
        stacks = sorted([*reported, *silent], key=lambda one: one.rank)
        verdict = decide_culprits(stacks)
        report = format_report(verdict, stacks)
        culprits = [[one.node, one.slot] for one in verdict.culprits]
        return [
            Note("hang", {"generation": plan.number, "reason": verdict.reason, "report": report}),
            Publish(f"gen/{plan.number}/culprits", {"culprits": culprits, "reason": verdict.reason}),
        ]

    def _act_on(self, verdict: Mapping[str, Any]) -> list[Instruction]:
        if not self._first(_HangDeed.KILL):
            return []
        mine = self._slots()
        return [
            KillWorker(int(slot), f"hangs: {verdict['reason']}")
            for node, slot in verdict["culprits"]
            if node == self.index and int(slot) in mine
        ]

    def _slots(self) -> dict[int, int]:
        """This node's placed slots and their ranks."""
        plan = self._generation
        placed = plan.of_node(self.index) if plan is not None else []
        return {member.slot: member.rank for member in placed if member.rank >= 0}

    def _silent(self, slot: int, rank: int) -> RankStack:
        return RankStack(rank, self.index, slot, -1, "", "", "")

    def _first(self, deed: _HangDeed) -> bool:
        is_first = deed not in self._done
        self._done.add(deed)
        return is_first
