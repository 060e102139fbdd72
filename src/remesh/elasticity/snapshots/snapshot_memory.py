"""Unnamed shared memory that outlives the process that made it: nothing is left behind however processes die.

A *buffer* is a memory file (``memfd``). The worker makes it, its agent opens it by the worker's descriptor in ``/proc``
and keeps it; from then on either may die. The kernel frees it with the last holder. Other workers of the node open it
by the agent's descriptor. Agents look at no tensor, so this module loads no torch.
"""

from __future__ import annotations

import mmap
import os

from remesh.elasticity.snapshots.snapshot_header import COMPLETE_AT


class SnapshotBuffer:
    """One snapshot's worth of shared memory, mapped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size
        self.memory = mmap.mmap(descriptor, self.nbytes)

    @classmethod
    def make(cls, nbytes: int) -> SnapshotBuffer:
        """New memory of this size, zeroed; pages are taken when they are written."""
        descriptor = os.memfd_create("remesh-snapshot", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(nbytes, mmap.PAGESIZE))
        return cls(descriptor)

    @classmethod
    def open(cls, path: str) -> SnapshotBuffer:
        """Memory that another process keeps, by its descriptor in ``/proc``. OSError when it is gone."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def path_in(self, pid: int) -> str:
        """The path for other processes of this host, while process ``pid`` keeps it open under this descriptor."""
        return f"/proc/{pid}/fd/{self.descriptor}"

    def set_complete(self, complete: bool) -> None:
        """Mark what is there as a snapshot, or as none."""
        self.memory[COMPLETE_AT] = int(complete)

    def close(self) -> None:
        """Let go of the memory. It stays mapped as long as this buffer, or a tensor in it, is referenced."""
        # Closing the map would take it from under tensors: torch holds the object, and no lock on it.
        os.close(self.descriptor)
