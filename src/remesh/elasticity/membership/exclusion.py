"""Exclusion from a job: nodes that fail again and again hold off, slow workers become standbys.

A node counts a *failure* when it dies, or loses a worker. Counts stand in the generation, by the node's name, so that a
restarted agent knows them too. After ``free`` failures every further one doubles the time for which the node holds off
before it asks to join; its workers that are in the mesh remain in it. Time is taken on the node's own clock, from when
it learned of the count. While the job waits for more workers no node holds off.

A worker that was found slower than the others may be left out at a step boundary, if the job is better off without it:
it is a standby for as long as its node would hold off. The remaining mesh has more to do per worker, so the worker must
be slower by more than that. One is left out at a time, and the next one is judged in the next generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from remesh.elasticity.model.generation import Generation
from remesh.elasticity.model.mesh_policy import MeshChoice, Template, decide_mesh


@dataclass(frozen=True, slots=True)
class ExclusionRules:
    """How patient a job is with nodes that fail."""

    free: int = 0
    """Failures after which a node may still come back at once; 0: always."""
    first_delay_s: float = 30.0
    """How long it holds off after the first failure beyond those."""
    max_delay_s: float = 3600.0

    def delay_s(self, beyond: int) -> float:
        """The delay after this many failures, at least 1, beyond the free ones."""
        # The exponent is bounded so that the power stays a number.
        return min(self.first_delay_s * 2.0 ** min(beyond - 1, 30), self.max_delay_s)


NO_EXCLUSION = ExclusionRules()


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """How patient a job is with workers that are slower than the others."""

    factor: float = 0.0
    """How many times as long as the others' median a worker may work per step; 0: any."""
    num_steps: int = 100
    """For how many steps it may work longer than that."""


NO_STRAGGLERS = StragglerRules()


@dataclass(frozen=True, slots=True)
class HoldOff:
    """A node is to wait before it asks to be let in."""

    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """A worker is to stand by from the next step boundary on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """A slow worker keeps its rank."""

    reason: str


def decide_leave_out(
    plan: Generation, template: Template, *, rank: int, ratio: float, min_nodes: int
) -> LeaveOut | Keep:
    """Whether the job is better off without a worker that works ``ratio`` times as long per step as the others."""
    slow = plan.members[rank]
    who = f"worker {slow.slot} of {plan.hosts[slow.node]} (rank {rank}) works {ratio:.2f} x as long as the others"
    rest = (member for member in plan.standby if (member.node, member.pid) not in plan.resting)
    others = [member for member in (*plan.members, *rest) if member != slow]
    choice = decide_mesh(template, len(others))
    if isinstance(choice, str):
        return Keep(f"{who}, but without it {choice}")
    num_nodes = len({member.node for member in others})
    if num_nodes < min_nodes:
        return Keep(f"{who}, but without it {num_nodes} of at least {min_nodes} nodes are left")
    more_work = len(plan.members) / choice.size
    if ratio <= more_work:
        return Keep(f"{who}, but without it each has {more_work:.2f} x the work, on {choice.size} places")
    return LeaveOut(f"{who}; without it {choice.reason}")


def would_grow(plan: Generation, template: Template) -> bool:
    """Whether those who stand by make a larger mesh possible."""
    choice = decide_mesh(template, len(plan.members) + len(plan.standby))
    return isinstance(choice, MeshChoice) and choice.size > len(plan.members)


def decide_rest(name: str, num_failures: int, rules: ExclusionRules) -> HoldOff:
    """How long a worker of this node stands by for being slow; ``num_failures`` counts this time.

    >>> decide_rest("a", 2, ExclusionRules()).seconds
    60.0
    """
    # As for a node that failed, but without a first time that is free.
    seconds = rules.delay_s(max(num_failures - rules.free, 1))
    return HoldOff(seconds, f"a worker of {name} was slower than the others: it stands by for {seconds:g} s")


def decide_hold_off(name: str, num_failures: int, rules: ExclusionRules) -> HoldOff | None:
    """How long a node with this many failures holds off; None when it need not.

    >>> decide_hold_off("a", 5, ExclusionRules(free=3)).seconds, decide_hold_off("a", 3, ExclusionRules(free=3))
    (60.0, None)
    """
    beyond = num_failures - rules.free
    if not rules.free or beyond <= 0:
        return None
    seconds = rules.delay_s(beyond)
    return HoldOff(seconds, f"{name} failed {num_failures} times, {rules.free} are free: it holds off {seconds:g} s")
