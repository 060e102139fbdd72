"""Comparison of copies: whether all ranks that hold one box of a tensor, under one name, hold the same values there.

One of them writes the box, and all will load what it wrote. Where values differ, names are equal by accident: stages of
a pipeline whose layers have local names, local shards given as plain tensors, DTensors on meshes that have no rank in
common. Two steps, which cost a save nothing where copies are equal:

1. Each rank sends one digest for each set of ranks that it shares boxes with. It goes over a sample of the elements of
   each box, and travels with a gather of the save.
2. Where those differ, the ranks send the digest of each box, and all find the same names. Whole tensors that are small
   may rightly differ, as means of batch norm do under DDP: the first rank's are stored, with a warning. All else is an
   error.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.formats.data_file import elements_of
from remesh.checkpoint.run.common_data import warn_once
from remesh.checkpoint.values.nests import named
from remesh.comm.gather import Group, gather_from, group_rank

logger = logging.getLogger(__name__)
_SAMPLED = 64
"""Elements of a box that are compared. A tensor of another layer, stage or shard differs in nearly all of them."""


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A box in the memory of this rank that others hold, too."""

    name: str
    start: tuple[int, ...]
    values: torch.Tensor
    may_differ: bool


Copies = Mapping[str, Sequence[HeldCopy]]
"""For each set of ranks, by a name of it, the boxes that exactly those hold; in an order that is equal on all."""


def digests_of(copies: Copies) -> dict[str, str]:
    """What this rank sends first, by set of ranks. Waits for the device that values lie on."""
    return {ranks: _digest([one.values for one in of_set]) for ranks, of_set in copies.items()}


def check_equal(by_rank: Sequence[Mapping[str, str]], copies: Copies, group: Group, doing: str) -> None:
    """Raise `CheckpointMismatchError` on all ranks, or warn on the first, where copies differ.

    Called by every rank of the group with the same ``by_rank``, their `digests_of`; no communication where all fit.
    """
    digests: dict[str, set[str]] = {}
    for ranks, digest in [item for of_rank in by_rank for item in of_rank.items()]:
        digests.setdefault(ranks, set()).add(digest)
    unlike = [ranks for ranks, found in digests.items() if len(found) > 1]
    if not unlike:  # nearly always
        return
    mine = [one for ranks in unlike for one in copies.get(ranks, ())]
    rows = gather_from(
        lambda: [[one.name, one.start, _digest([one.values]), one.may_differ] for one in mine], group, doing
    )
    boxes: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    strict: set[str] = set()
    for rank, of_rank in enumerate(rows):
        for name, start, digest, may_differ in of_rank:
            boxes.setdefault((name, tuple(start)), {})[rank] = digest
            strict |= set() if may_differ else {name}
    differing = {name: sorted(found) for (name, _), found in boxes.items() if len({*found.values()}) > 1}
    if refused := [name for name in differing if name in strict]:
        first = refused[0]
        raise CheckpointMismatchError(
            f"{doing}: {len(differing)} tensors have other values on each rank that holds them, {named(differing)}; "
            f"expected equal ones under one name, such as of {first!r} on ranks {differing[first]}, since one rank's "
            "are stored and all will load them. If each rank has a tensor of its own, as stages of a pipeline with "
            "layers of local names, give each a name of its own, such as a prefix; if each has a part of one, give a "
            "DTensor or a Piece; if the first rank's are meant, give the others a Piece without shards"
        )
    if group_rank(group) == 0:
        warn_once(
            logger,
            sorted(differing),
            f"{doing}: {len(differing)} small tensors have other values on each rank, {named(sorted(differing))}; "
            "those of the first rank that holds each are stored, and all ranks will load them. Give a prefix to "
            "what every rank has of its own, as stages of a pipeline do, or give it as a row of a Piece",
        )


def _digest(values: Iterable[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for one in values:
        samples.setdefault((one.dtype, one.device), []).append(_sample(one))
    for (dtype, _), of_kind in samples.items():
        found.update(str(dtype).encode())
        found.update(elements_of(torch.cat(of_kind)))
    return found.hexdigest()


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Elements all over a tensor, by their index alone: in memory, ranks may order them otherwise."""
    values = values.detach()
    num_elements = values.numel()
    # An odd step, so that rows of an even length are not sampled in one column.
    step = max(1, (num_elements - 1) // (_SAMPLED - 1) - 1 | 1) if num_elements > _SAMPLED else 1
    count = min(_SAMPLED, num_elements)
    if values.is_quantized:
        values = values.int_repr()
    if values.is_contiguous() and not values.is_conj() and not values.is_neg():
        return values.as_strided((count,), (step,))
    at = torch.arange(count, dtype=torch.int64, device=values.device) * step
    return values[torch.unravel_index(at, values.shape)].resolve_conj().resolve_neg()
