"""Options and time limits of an agent, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from remesh.elasticity.membership.exclusion import NO_EXCLUSION, NO_STRAGGLERS, ExclusionRules, StragglerRules
from remesh.elasticity.model.generation import MeetingRules


@dataclass(frozen=True, slots=True)
class AgentRules:
    """The options and time limits of an agent."""

    num_slots: int
    max_restarts: int
    """How many killed workers this node may replace."""
    meeting: MeetingRules
    leave_timeout_s: float
    """How long a worker may take to get out of a broken generation before it is killed as hung."""
    exit_timeout_s: float
    """How long workers may take to end once they have got the signal."""
    hang_timeout_s: float = 300.0
    """How long workers may go without a step before all are asked where they stand."""
    exclusion: ExclusionRules = NO_EXCLUSION
    """How long this node holds off when it has failed again and again."""
    stragglers: StragglerRules = NO_STRAGGLERS
    """When a worker is left out for being slower than the others."""
