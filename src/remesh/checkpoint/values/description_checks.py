"""Pure checks of a sharded state: the descriptions of all ranks fit together, and fit the checkpoint.

Every rank gathers the descriptions of all and runs the same check on the same values, so all ranks reach the same
verdict and raise the same error; none of them waits for another that has given up.

1. *Integrity*: for each tensor key, all ranks agree on dtype and global shape, and the boxes of the main replicas
   cover the global box exactly once. For each object key, the main replicas fill the array exactly once.
2. *Strictness*: which keys are wanted here but not stored (*unexpected*), which are stored but wanted by no rank
   (*missing*), and what the user wants to be done about it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import ShardedObject, ShardedTensor, is_main_replica
from remesh.foundation.errors import LayoutError
from remesh.layout import Box, Layout, Shard
from remesh.layout.from_torch import dtype_name

_MAX_LISTED = 5


class StrictHandling(Enum):
    """The treatment of keys that only the state dict, or only the checkpoint, has."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Look for nothing; a wanted key that is not stored is an error of the read."""
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether wanted keys are compared with stored ones before the read."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether the wanted keys of all ranks are needed."""
        return val in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether ``load`` returns the keys beside the state dict."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


_RAISING = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
_LOGGING = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """The mode of that name; ValueError when there is none."""
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        raise ValueError(
            f"Invalid strict flag: {strict!r}; expected one of {', '.join(mode.value for mode in StrictHandling)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Keys in which a request and a checkpoint differ, as far as the mode looks."""

    absent: set[str] = field(default_factory=set)
    """Keys that this rank asks for and that are not stored: the load goes without them."""
    missing: set[str] = field(default_factory=set)
    """Stored keys that no rank asks for. Empty in modes that do not look at all ranks."""
    unexpected: set[str] = field(default_factory=set)
    """``absent``, except in the mode that ignores what differs."""
    reported: set[str] = field(default_factory=set)
    """The unexpected keys for a message: this rank's own, but those of all ranks in the one error that all raise."""


def find_mismatch(strict: StrictHandling, stored: set[str], local: set[str], everywhere: set[str]) -> Mismatch:
    """Compare the stored keys with those that this rank and that any rank asks for.

    >>> find_mismatch(StrictHandling.RETURN_ALL, {"a", "b"}, {"a", "new"}, {"a", "new"}).missing
    {'b'}
    """
    absent = local - stored
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        return Mismatch()
    if strict is StrictHandling.IGNORE_ALL:
        return Mismatch(absent)
    missing = stored - everywhere if StrictHandling.requires_global_app_metadata(strict) else set[str]()
    return Mismatch(absent, missing, absent, everywhere - stored if strict is StrictHandling.RAISE_ALL else absent)


def decide_on_mismatch(strict: StrictHandling, missing: set[str], unexpected: set[str]) -> str | None:
    """The warning to log in this mode, or None; `CheckpointMismatchError` where the mode is to raise."""
    if not missing and not unexpected:
        return None
    text = ""
    if missing:
        text += "Some keys found in the checkpoint are missing in the provided sharded state dict. "
    if unexpected:
        text += "Unexpected keys (not found in the checkpoint) encountered in the provided sharded state dict. "
    if missing:
        text += f"\nMissing keys (for all ranks): {missing}. "
    if unexpected:
        whose = "all ranks" if strict is StrictHandling.RAISE_ALL else "this rank"
        text += f"\nUnexpected keys (for {whose}): {unexpected}. "
    if strict in _RAISING:
        raise CheckpointMismatchError(text)
    return text if strict in _LOGGING else None


def raise_problems(problems: Sequence[str]) -> None:
    """Raise all problems of a sharding in one `CheckpointMismatchError`, if there are any."""
    if problems:
        more = f" (and {len(problems) - _MAX_LISTED} more)" if len(problems) > _MAX_LISTED else ""
        raise CheckpointMismatchError(
            f"Invalid sharding pattern validation. Errors: {'; '.join(problems[:_MAX_LISTED])}{more}. Every element "
            "must belong to exactly one main replica over all ranks: correct the offsets, shapes and replica ids"
        )


def tensor_problem(key: str, shards: Sequence[tuple[int, ShardedTensor]]) -> str | None:
    """The problem with the shards of a tensor, given as ``(rank, shard)``; None if there is none."""
    first_rank, first = shards[0]
    for rank, shard in shards[1:]:
        for name in ("dtype", "global_shape", "has_regular_grid"):
            expected, found = getattr(first, name), getattr(shard, name)
            if expected != found:
                return f"{name} of {key!r} is {expected} on rank {first_rank} but {found} on rank {rank}"
    mains = [(rank, shard.global_box()) for rank, shard in shards if is_main_replica(shard.replica_id)]
    if len(mains) == 1 and mains[0][1] == Box.of_shape(first.global_shape):
        return None  # by far the most common case, and the layout algebra costs more than all else here
    layout = Layout(first.global_shape, tuple(Shard(rank, box) for rank, box in mains), dtype_name(first.dtype))
    counts = Counter(box for _, box in mains if not box.is_empty)
    repeated = [box for box, count in counts.items() if count > 1]
    if repeated:
        ranks = [rank for rank, box in mains if box == repeated[0]]
        return (
            f"Invalid access pattern for {key!r}: box {repeated[0]} belongs to {len(ranks)} main replicas, on ranks "
            f"{ranks}, expected 1"
        )
    try:
        layout.check_in_bounds(key)
        layout.check_disjoint(key)
        layout.check_complete(key)
    except LayoutError as raised:
        return f"Invalid access pattern for {key!r}: {raised}"
    return None


def object_problem(key: str, elements: Sequence[tuple[int, ShardedObject]]) -> str | None:
    """The problem with the elements of an array of objects, given as ``(rank, element)``; None if there is none."""
    first_rank, first = elements[0]
    for rank, element in elements[1:]:
        if element.global_shape != first.global_shape:
            return (
                f"global_shape of object {key!r} is {first.global_shape} on rank {first_rank} but "
                f"{element.global_shape} on rank {rank}"
            )
    counts = Counter(element.unique_key for _, element in elements if is_main_replica(element.replica_id))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        return f"Duplicate ShardedObject keys: {repeated}"
    num_missing = math.prod(first.global_shape) - len(counts)
    if num_missing:
        return f"Invalid access pattern for {key!r}: {num_missing} ShardedObject are missing."
    return None
