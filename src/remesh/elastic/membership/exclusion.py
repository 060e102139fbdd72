"""May a node that failed again and again come back at once? How long it holds off, and why.

A node counts a *failure* when it dies, or loses a worker. Counts stand in the generation, by the node's name, so that
an agent that was started anew knows them too. After ``free`` failures every further one doubles the time that the node
holds off before it asks to be let in; its workers that are in the mesh stay there. Time is taken on the node's own
clock, from when it learned of the count. While the job stands still for want of workers nobody holds off.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExclusionRules:
    """How patient a job is with nodes that fail."""

    free: int = 0
    """Failures after which a node may still come back at once; 0: always."""
    first_delay_s: float = 30.0
    """How long it holds off after the first failure beyond those."""
    max_delay_s: float = 3600.0


NO_EXCLUSION = ExclusionRules()


@dataclass(frozen=True, slots=True)
class HoldOff:
    """A node is to wait before it asks to be let in."""

    seconds: float
    reason: str


def decide_hold_off(name: str, num_failures: int, rules: ExclusionRules) -> HoldOff | None:
    """How long a node with this many failures holds off; None when it need not.

    >>> decide_hold_off("a", 5, ExclusionRules(free=3)).seconds, decide_hold_off("a", 3, ExclusionRules(free=3))
    (60.0, None)
    """
    beyond = num_failures - rules.free
    if not rules.free or beyond <= 0:
        return None
    # The exponent is bounded so that the power stays a number.
    seconds = min(rules.first_delay_s * 2 ** min(beyond - 1, 30), rules.max_delay_s)
    return HoldOff(seconds, f"{name} failed {num_failures} times, {rules.free} are free: it holds off {seconds:g} s")
