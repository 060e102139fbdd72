"""Program of one rank in a plan, its messages and copies, and the times of messages.

Definitions. A *message* carries one chunk from one rank to another in one round. A *copy* is a slice that a taker
holds itself. The *program* of a rank is its part of a plan: its copies, and what it gives and takes, by round.
"""

from __future__ import annotations

from dataclasses import dataclass

from remesh.layout import Box


@dataclass(frozen=True, slots=True)
class Message:
    """One chunk from one rank to another."""

    round: int
    """Counted from 0. Invariant: a rank gives at most one message and takes at most one in a round."""
    giver: int
    taker: int
    chunk: int
    """Number of the chunk. Invariant: the giver holds its parts or took the chunk in an earlier round."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A slice that stays where it is held."""

    tensor: int
    """Position of the tensor among the moves."""
    box: Box
    """In global indices."""
    ranks: tuple[int, ...]
    """Ranks that hold and want it, ascending. Invariant: at least one."""


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a plan."""

    copies: tuple[Copy, ...]
    gives: tuple[Message, ...]
    """By round."""
    takes: tuple[Message, ...]
    """By round."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One rank's part in the running sum of one chunk."""

    chunk: int
    """Number of the chunk in the reduction."""
    rank: int
    addends: tuple[int, ...]
    """Addends of the chunk that the rank joins, in this order. Invariant: at least one; the rank holds them."""


@dataclass(frozen=True, slots=True, order=True)
class Timing:
    """The times of a message, and its size: simulated, or measured by a run."""

    stage: int
    """0 while partial sums are summed, 1 while whole values move."""
    round: int
    """Round of the stage's schedule."""
    giver: int
    taker: int
    nbytes: int
    start_s: float
    """When the giver began to send it; on a taker's own list: when it began to wait for it. Simulated: in the plan."""
    finish_s: float
    """When the taker had it; on a giver's own list: when the giver knew that it was sent."""
