"""Registry of processes that we have frozen, so that cleanup can kill them without importing ptrace.

A process that was killed while its threads were traced is not gone before its tracer has reaped them.
"""

from __future__ import annotations

from typing import Final, Protocol


class FrozenTree(Protocol):
    """A process that is frozen with all of its descendants."""

    def bury(self) -> None:
        """Reap all threads after the processes were killed."""

    def thaw_if_killed(self) -> None:
        """Let the others run on if the first process was killed."""


FROZEN: Final[dict[int, FrozenTree]] = {}
"""The trees that this process holds, by the id of the first process of each."""


def bury(pid: int) -> None:
    """Reap the threads of a killed process and its descendants if this process holds them."""
    held = FROZEN.pop(pid, None)
    if held is not None:
        held.bury()


def thaw_if_killed(pid: int) -> None:
    """Let a process that this one holds be seen to have ended, if somebody has killed it."""
    if pid in FROZEN:
        FROZEN[pid].thaw_if_killed()
