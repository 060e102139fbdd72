"""Is the common data the same on all ranks? It should be; rank 0's is written whatever the others have.

A digest of it travels with the first gather of a save, so that ranks which agree, as they nearly always do, pay
nothing more. Where digests differ, rank 0's data goes to all, and each rank that finds a difference warns of it.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.checkpoint.formats.data_file import dump_object, load_object
from remesh.checkpoint.values.nests import diff
from remesh.comm.gather import Group, gather_bytes, group_device, group_rank

logger = logging.getLogger(__name__)


def digest_of(common: dict[str, Any] | None) -> str | None:
    """A digest of common data; None for None and for data that cannot be stored, with which nothing is compared."""
    blob = _dumped(common)
    return hashlib.sha256(blob).hexdigest() if blob else None


def warn_of_differences(common: dict[str, Any] | None, group: Group = None) -> None:
    """Warn on every rank whose common data differs from rank 0's. Called by every rank of the group."""
    rank = group_rank(group)
    blob = _dumped(common)
    mine = bytearray(blob if rank == 0 else b"")
    raw = torch.frombuffer(mine, dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
    first = gather_bytes(raw.to(group_device(group)), group)[0].cpu().numpy().tobytes()
    if not first or not blob or rank == 0:
        return
    only_first, only_here, mismatch = diff(load_object(first, "the common data of rank 0"), load_object(blob, "ours"))
    if only_first or only_here or mismatch:
        logger.warning(
            "Rank %s common state dict differs from rank 0 common state dict. Keys only on rank 0: %s, Keys only on "
            "%s: %s, Mismatched keys: %s",
            rank,
            only_first,
            rank,
            only_here,
            mismatch,
        )


def _dumped(common: dict[str, Any] | None) -> bytes:
    if common is None:
        return b""
    try:
        return dump_object(common, "the common data")
    except CheckpointMismatchError:
        return b""
