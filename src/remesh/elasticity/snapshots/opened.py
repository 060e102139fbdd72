"""State in a snapshot, as a worker takes it: tensors that view the shared memory."""

from __future__ import annotations

import torch

from remesh.elasticity.snapshots.form import read_description
from remesh.elasticity.snapshots.snapshot_memory import SnapshotBuffer
from remesh.elasticity.training_state import HeldState
from remesh.layout.from_torch import Piece, torch_dtype


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
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        raw = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=count, offset=start) if count else none
        tensor = raw.view(torch_dtype(entry.dtype))
        pieces[entry.name] = Piece(tensor.view(entry.local_shape), entry.global_shape, entry.shards)
    return HeldState(snapshot.step, snapshot.samples, pieces, dict(snapshot.values), snapshot.line)
