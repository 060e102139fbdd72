"""State of an agent in one phase: its start, the one-time actions done in it, and the next liveness check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from remesh.elasticity.membership.instructions import Instruction, Probe
from remesh.elasticity.membership.phases import DEEDS, Deed, Phase

FIRST_PROBE_S, MAX_PROBE_S = 0.05, 1.0
"""How long an agent waits between two looks whether another lives: doubled each time, up to the second."""

STAY_POLL_S = 0.01
"""How often an agent looks for news of the others, through all of a job."""
HURRY_S, HURRY_FOR_S = 0.001, 0.5
"""How often it does while workers wait for a plan, and for how long at most."""
CALM_NODES = 100
"""With so many nodes the store has enough to do: no agent hurries."""
WAKE_NODES = 16
"""In a larger job no agent wakes others at a break: all may see it at once, and would call each other up."""


@dataclass
class PhaseState:
    """Begun anew with every change of phase."""

    phase: Phase = Phase.STARTING
    since_s: float = 0.0
    done: set[tuple[Deed, object]] = field(default_factory=set)
    """One-time actions that were done, with their object or reason."""
    _next_probe_s: float = field(init=False)
    _probe_gap_s: float = FIRST_PROBE_S

    def __post_init__(self) -> None:
        self._next_probe_s = self.since_s

    def first(self, deed: Deed, detail: object = None) -> bool:
        """Whether this was not yet done; it counts as done from now on."""
        assert self.phase in DEEDS[deed], f"{deed} does not belong to {self.phase}"
        is_first = (deed, detail) not in self.done
        self.done.add((deed, detail))
        return is_first

    def has_done(self, deed: Deed) -> bool:
        """Whether this was done."""
        return (deed, None) in self.done

    def look_again_s(self, now_s: float, num_nodes: int) -> float:
        """How soon to look for news again."""
        if self.phase not in (Phase.LEAVING, Phase.MEETING) or now_s - self.since_s > HURRY_FOR_S:
            return STAY_POLL_S
        return min(STAY_POLL_S, HURRY_S + (STAY_POLL_S - HURRY_S) * num_nodes / CALM_NODES)

    def probe(self, indices: Sequence[int], now_s: float) -> list[Instruction]:
        """Look whether these nodes live, if it is time to."""
        if not indices or now_s < self._next_probe_s:
            return []
        self._next_probe_s = now_s + self._probe_gap_s
        self._probe_gap_s = min(2 * self._probe_gap_s, MAX_PROBE_S)
        return [Probe(tuple(indices))]
