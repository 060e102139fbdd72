"""Common data of a save: compared across ranks, and joined or taken from rank 0 where it differs.

A digest of it travels with the first gather of a save, so that ranks which agree, as they nearly always do, pay
nothing more. Where digests differ, there are two ways:

1. *Joined* (plain states): a value is that of the first rank that has it. So nothing is lost of ranks that have keys of
   their own, as the stages of a pipeline have for their layers. The first rank warns of values that differ.
2. *The first rank's* (sharded states, as programs for Megatron Core expect): rank 0's data goes to all, and each rank
   that finds a difference warns of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.formats.data_file import dump_common, load_object
from remesh.checkpoint.run.collective_steps import take_step
from remesh.checkpoint.values.nests import Path, check_no_tensors, diff, name_of, named
from remesh.comm.gather import Group, gather_bytes, group_device, group_rank

logger = logging.getLogger(__name__)
_warned: set[tuple[str, ...]] = set()
"""The names of values that differed when this process has warned of them: each save finds the same again."""


@dataclass(frozen=True, slots=True)
class Common:
    """The common data of a rank."""

    values: dict[str, Any]
    blob: bytes | None = None
    """The same serialised; None until that is done."""
    digest: str = ""
    """Of the blob: ranks with equal ones have the same data."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Common:
        """Serialised, to be compared; `CheckpointMismatchError` for what could not be loaded again."""
        blob = dump_common(values)
        return cls(values, blob, hashlib.sha256(blob).hexdigest())


def join_common(mine: Common, digests: Sequence[str], tensors: Iterable[str], group: Group, doing: str) -> Common:
    """The common data of all ranks in one, on the first rank; on the others their own. Called by every rank.

    To be called where the digests of all ranks, given by rank, are not equal. ``tensors`` are the names of the tensors
    of all, which the first rank knows.
    """
    rank = group_rank(group)
    tells = rank > 0 and digests.index(digests[rank]) == rank  # of equal ones the first
    blobs = gather_bytes(_bytes_of((tells and mine.blob) or b"").to(group_device(group)), group, doing)

    def join() -> Common:
        if rank > 0:
            return mine
        joined, differing = mine.values, set[str]()
        for other, sent in enumerate(blobs):
            if sent.numel():
                theirs = load_object(sent.cpu().numpy().tobytes(), f"the common data of rank {other}")
                joined = _joined(joined, theirs, differing)
        warn_once(
            logger,
            sorted(differing),
            f"{doing}: {len(differing)} plain values differ between ranks, {named(sorted(differing))}, expected equal "
            "ones; those of the first rank that has each are stored, and all ranks will load them. Give what every "
            "rank has of its own as a row of a Piece, or gather it into a list",
        )
        check_no_tensors(joined, tensors)
        return Common(joined)

    return take_step(join, group, doing).mine


def _joined(mine: Any, theirs: Any, differing: set[str], path: Path = ()) -> Any:
    """What either has; of what both have the first, with the names of what differs put into the set."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        both = {key: _joined(mine[key], value, differing, (*path, key)) for key, value in theirs.items() if key in mine}
        return mine | both | {key: value for key, value in theirs.items() if key not in mine}
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        return [
            _joined(one, other, differing, (*path, at))
            for at, (one, other) in enumerate(zip(mine, theirs, strict=True))
        ]
    differing.update(name_of((*path, *where)) for where in _differences(mine, theirs))
    return mine


def _differences(mine: Any, theirs: Any) -> Iterator[Path]:
    only_mine, only_theirs, unequal = diff({0: mine}, {0: theirs})
    yield from (where[1:] for where in [*only_mine, *only_theirs, *(found for found, *_ in unequal)])


def warn_once(to: logging.Logger, names: Sequence[str], text: str) -> None:
    """Log a warning of these names, if there are any, unless this process has warned of the same before."""
    if names and tuple(names) not in _warned:
        _warned.add(tuple(names))
        to.warning("%s", text)


def digest_of(common: dict[str, Any] | None) -> str | None:
    """A digest of common data; None for None and for data that cannot be stored, with which nothing is compared."""
    blob = _dumped(common)
    return hashlib.sha256(blob).hexdigest() if blob else None


def warn_of_differences(common: dict[str, Any] | None, group: Group = None) -> None:
    """Warn on every rank whose common data differs from rank 0's. Called by every rank of the group."""
    rank = group_rank(group)
    blob = _dumped(common)
    first = (
        gather_bytes(_bytes_of(blob if rank == 0 else b"").to(group_device(group)), group)[0].cpu().numpy().tobytes()
    )
    if not first or not blob or rank == 0:
        return
    try:
        of_first = load_object(first, "the common data of rank 0")
    except CheckpointFormatError as raised:  # of a class that this rank has not allowed; the others go on
        logger.warning("Rank %s cannot compare its common state dict with that of rank 0: %s", rank, raised)
        return
    only_first, only_here, mismatch = diff(of_first, load_object(blob, "ours"))
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


def _bytes_of(blob: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        if blob
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _dumped(common: dict[str, Any] | None) -> bytes:
    if common is None:
        return b""
    try:
        return dump_common(common)
    except CheckpointMismatchError:
        return b""
