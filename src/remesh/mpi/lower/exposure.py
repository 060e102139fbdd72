"""What of this rank's memory does a window give to others, who holds its lock, and who waits for that?

A window has one lock on each rank, which the lower half of that rank keeps. Any number of origins share it, or one
has it alone. Who asks for it gets it when all who hold it may share it with him and nobody waits: so whoever waits is
served in order of arrival, and a row of sharers never keeps an exclusive lock away. Source: MPI 4.1, section 12.5.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remesh.mpi.lower.accesses import Runs


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

    def ask(self, asker: Asker) -> list[Asker]:
        """Someone wants it; who has got it by that."""
        self.waiting.append(asker)
        return self._grant()

    def release(self, rank: int) -> list[Asker]:
        """A holder gives it back; who has got it by that."""
        self.holders = [holder for holder in self.holders if holder.rank != rank]
        return self._grant()

    def _grant(self) -> list[Asker]:
        granted = []
        while self.waiting and self._may_have(self.waiting[0]):
            granted.append(self.waiting.pop(0))
            self.holders.append(granted[-1])
        return granted

    def _may_have(self, asker: Asker) -> bool:
        return not self.holders or not (asker.exclusive or self.holders[0].exclusive)


@dataclass(slots=True)
class Window:
    """What this rank gives to the others."""

    base: int  # address that displacements count from; 0 if they are addresses
    regions: dict[int, int] = field(default_factory=dict)  # address -> bytes: what may be accessed
    locks: Locks = field(default_factory=Locks)

    def holds(self, runs: Runs) -> bool:
        """Whether each run lies within one region."""
        return all(self._holds(self.base + offset, length) for offset, length in runs)

    def _holds(self, address: int, num_bytes: int) -> bool:
        return any(start <= address <= address + num_bytes <= start + size for start, size in self.regions.items())
