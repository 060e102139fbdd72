"""JSON forms of ``remesh ckpt --json``: plain values, names with their units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from remesh.checkpoint.plan.manifest import Extent, StoredTensor
from remesh.checkpoint.run.housekeeping import Decision, ListedCheckpoint
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.layout.from_torch import torch_dtype


def form_of_listed(one: ListedCheckpoint) -> dict[str, Any]:
    """A directory of a step, without its metrics."""
    return {
        "step": one.step,
        "directory": str(one.directory),
        "state": one.state.value,
        "problem": one.problem,
        "num_bytes": one.num_bytes,
    }


def form_of_checkpoint(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """All that ``show`` shows; common data that JSON has no form for stands as its text."""
    manifest = checkpoint.manifest
    return {
        "directory": str(checkpoint.directory),
        "tensors": [form_of_tensor(name, stored) for name, stored in manifest.tensors.items()],
        "objects": [{"name": name, **_place(extent)} for name, extent in manifest.objects.items()],
        "common": checkpoint.common,
    }


def form_of_tensor(name: str, stored: StoredTensor) -> dict[str, Any]:
    """A tensor, and how it is cut."""
    return {
        "name": name,
        "dtype": stored.dtype,
        "shape": list(stored.global_shape),
        "num_bytes": math.prod(stored.global_shape) * torch_dtype(stored.dtype).itemsize,
        "chunks": [
            {"start": list(chunk.box.start), "shape": list(chunk.box.shape), **_place(chunk.extent)}
            for chunk in stored.chunks
        ],
    }


def form_of_decisions(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """What ``gc`` decides on, and why."""
    return [{**form_of_listed(one.found), "removes": one.removes, "reason": one.reason} for one in decisions]


def _place(extent: Extent) -> dict[str, Any]:
    return {"file": extent.file, "file_start": extent.file_start, "length_bytes": extent.length_bytes}
