"""Shared memory that outlives whoever made it, without a name: nothing is left behind however processes die.

A *buffer* is a memory file (``memfd``). The worker makes it, its agent opens it by the worker's descriptor in ``/proc``
and keeps it; from then on either may die. The kernel frees it with the last holder. Other workers of the node open it
by the agent's descriptor.
"""

from __future__ import annotations

import mmap
import os

import torch

from remesh.elastic.snapshots.form import COMPLETE_AT, read_description
from remesh.elastic.state import HeldState
from remesh.layout.from_torch import Piece, torch_dtype


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
        """Where others on this host find it, as long as process ``pid`` keeps it under this descriptor."""
        return f"/proc/{pid}/fd/{self.descriptor}"

    def set_complete(self, complete: bool) -> None:
        """Mark what is there as a snapshot, or as none."""
        self.memory[COMPLETE_AT] = int(complete)

    def close(self) -> None:
        """Give the memory back. Tensors that were read from it keep it mapped until they go."""
        os.close(self.descriptor)
        try:
            self.memory.close()
        except BufferError:
            # Tensors still look into it; the mapping goes with the last of them.
            return


def read_snapshot(buffer: SnapshotBuffer) -> HeldState | None:
    """The state in a buffer, its tensors looking into the shared memory; None when there is none.

    FormatError when what is there is damaged.
    """
    found = read_description(memoryview(buffer.memory))
    if found is None:
        return None
    snapshot, data_start = found
    pieces = {}
    for entry in snapshot.entries:
        count = entry.nbytes
        start = data_start + entry.start
        # An empty tensor has no bytes to look at.
        raw = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=count, offset=start) if count else torch.empty(0)
        tensor = raw.view(torch_dtype(entry.dtype)) if count else raw.to(torch_dtype(entry.dtype))
        pieces[entry.name] = Piece(tensor.view(entry.local_shape), entry.global_shape, entry.shards)
    return HeldState(snapshot.step, snapshot.samples, pieces, dict(snapshot.values), snapshot.line)
