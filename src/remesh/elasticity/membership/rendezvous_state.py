"""Rendezvous as an agent sees it: who is known to be lost, who leads, what this node brought, and the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from remesh.elasticity.membership.instructions import NodeDead, Publish, StoreView
from remesh.elasticity.model.generation import (
    Generation,
    GiveUp,
    MeetingRules,
    Wait,
    WorkerReport,
    check_quorum,
    check_state_is_here,
    compute_bases,
    decide_generation,
)


@dataclass
class Losses:
    """Nodes that this agent thinks dead."""

    proofs: dict[int, str] = field(default_factory=dict)
    """Node index -> why."""
    silent: set[int] = field(default_factory=set)
    """Those of them that may be alive, cut off from here."""

    def take(self, event: NodeDead) -> None:
        """A node is gone, or fell silent."""
        self.proofs[event.index] = event.proof
        (self.silent.discard if event.is_certain else self.silent.add)(event.index)

    def forget(self, plan: Generation) -> None:
        """Forget the proofs against members of a generation that was decided: they are alive."""
        self.proofs = {index: proof for index, proof in self.proofs.items() if index not in plan.nodes}
        self.silent &= self.proofs.keys()


@dataclass
class AgentMeeting:
    """One agent's part in one meeting."""

    index: int
    """The agent's own."""
    number: int = 0
    """Of the generation that it will decide."""
    turn: int = 0
    """Leaders that it has lost."""
    brought: tuple[WorkerReport, ...] | None = None
    """What this node last brought; None when that has to be written again."""

    def bring(self, reports: tuple[WorkerReport, ...]) -> Publish:
        """Publish the workers that this node brings."""
        self.brought = reports
        workers = [asdict(report) for report in reports]
        return Publish(f"gen/{self.number}/here/{self.index}", {"workers": workers}, once=False)

    def lead(self) -> Publish:
        """Propose to lead, in the current term."""
        return Publish(f"gen/{self.number}/lead/{self.turn}", {"node": self.index})

    def propose(self, plan: Generation) -> Publish:
        """Publish a plan; the first proposal holds."""
        return Publish(f"gen/{self.number}/plan", plan.to_json())


def conclude(view: StoreView, losses: Losses, rules: MeetingRules, waited_s: float) -> Generation | Wait | GiveUp:
    """What the leader decides from what all brought, if those who came are enough to decide it."""
    decision = decide_generation(view.plan, view.nodes, view.here, losses.proofs, rules, waited_s)
    if not isinstance(decision, Generation):
        return decision
    gone = {index for index, reports in view.here.items() if not reports} | losses.proofs.keys()
    bases = compute_bases(view.plan, decision.step, gone - losses.silent)
    decision = replace(decision, place=view.place, bases=bases)
    hosts = {} if view.plan is None else view.plan.hosts
    silent = {index: name for index, name in hosts.items() if index in losses.silent}
    return (
        check_quorum(decision, view.here.keys(), rules, waited_s)
        or check_state_is_here(decision, view.here, silent, rules, waited_s)
        or decision
    )
