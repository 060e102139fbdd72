"""Story of faults that follows from its seed alone. Pure.

A *fault* is one thing that happens to a running job. A story can be run from any of its faults on, so that a long soak
can be split and a failing one repeated.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Kind(enum.Enum):
    """What may happen."""

    WORKER_KILLED = "worker SIGKILL"
    NODE_KILLED = "node SIGKILL"
    WORKER_STALLED = "worker SIGSTOP, goes on"
    WORKER_FROZEN = "worker SIGSTOP for good"
    NODE_FROZEN = "node SIGSTOP, goes on"
    NODE_CUT = "node cut off and back"
    LINK_SLOW = "slow link"
    STORE_KILLED = "store SIGKILL"
    NODE_PREEMPTED = "node SIGTERM"
    DISK_FULL = "disk full"


NETWORK = frozenset({Kind.NODE_CUT, Kind.LINK_SLOW})
"""Kinds that need a testbed."""
ENDS_LIFE = frozenset({Kind.STORE_KILLED, Kind.DISK_FULL})
"""Kinds after which all agents may end; the job is then started again, as a platform would."""
_WEIGHTS = {
    Kind.WORKER_KILLED: 8,
    Kind.NODE_KILLED: 4,
    Kind.WORKER_STALLED: 3,
    Kind.WORKER_FROZEN: 2,
    Kind.NODE_FROZEN: 3,
    Kind.NODE_CUT: 3,
    Kind.LINK_SLOW: 3,
    Kind.STORE_KILLED: 1,
    Kind.NODE_PREEMPTED: 3,
    Kind.DISK_FULL: 1,
}
_LENGTHS_S = {
    # Shorter than a heartbeat's patience of 5 s, or longer.
    Kind.WORKER_STALLED: (0.2, 2.0),
    Kind.NODE_FROZEN: (0.5, 8.0),
    Kind.NODE_CUT: (0.5, 8.0),
    Kind.LINK_SLOW: (0.5, 2.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens."""

    number: int
    """Its place in the story."""
    kind: Kind
    node: int
    slot: int
    """Of the worker that is hurt, where one is."""
    after_steps: int
    """Steps that the job takes in peace before it."""
    delay_s: float
    """How long after the last of these steps it happens: anywhere in a step, a vote, a save."""
    length_s: float
    """How long it lasts, where it ends by itself."""
    is_early: bool
    """Whether it strikes before all workers are back."""


def tell_story(seed: int, num_faults: int, *, num_nodes: int, num_slots: int, kinds: frozenset[Kind]) -> list[Fault]:
    """The faults of a seed, in order; the first ``n`` are the same however many are asked for."""
    rng = random.Random(f"chaos {seed}")
    chosen = [kind for kind in Kind if kind in kinds]
    story = []
    for number in range(num_faults):
        kind = rng.choices(chosen, [_WEIGHTS[each] for each in chosen])[0]
        low, high = _LENGTHS_S.get(kind, (0.0, 0.0))
        story.append(
            Fault(
                number,
                kind,
                node=rng.randrange(num_nodes),
                slot=rng.randrange(num_slots),
                after_steps=rng.randrange(1, 12),
                delay_s=rng.random() * 0.08,
                length_s=rng.uniform(low, high),
                is_early=rng.random() < 0.25,
            )
        )
    return story
