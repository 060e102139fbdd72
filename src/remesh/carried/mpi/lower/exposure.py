"""Memory that this rank exposes in windows, the holders of each window's lock, and its waiters.

A window has one lock on each rank, which the lower half of that rank keeps. Any number of origins share it, or one
has it alone. The engine says whose turn it is (``_engine_locks.c``).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Asker:
    """An origin that wants, or has, the lock."""

    rank: int  # world rank
    exclusive: bool
    request: int  # at the origin: completes when the lock is his


@dataclass(slots=True)
class Locks:
    """The lock of a window on one rank. Invariant: one holder, or holders that all share."""

    holders: list[Asker] = field(default_factory=list)
    waiting: list[Asker] = field(default_factory=list)  # in order of arrival


@dataclass(slots=True)
class Exposure:
    """The memory and the lock that a window has on this rank."""

    base: int  # address that displacements count from; 0 if they are addresses
    regions: dict[int, int] = field(default_factory=dict)  # address -> bytes: what may be accessed
    locks: Locks = field(default_factory=Locks)
