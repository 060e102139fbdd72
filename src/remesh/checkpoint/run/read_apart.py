"""Temporary tensors of a load: what is read into memory of its own, and copied into place at the end.

1. Pieces of a tensor that is not contiguous: their boxes cannot be seen in it.
2. Tensors of several names in one memory. A model whose output layer is its embedding asks for both, and fills one
   memory twice. If the model that was saved kept them apart, whichever is read last would win. So afterwards each is
   compared with what is there: of two that differ, one shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.nests import named
from remesh.layout.from_torch import Piece, piece_of
from remesh.layout.torch_memory import find_shared, is_there, put_back


@dataclass(frozen=True, slots=True)
class ReadApart:
    """A tensor that is filled from a copy."""

    key: str
    piece: Piece
    """What is to be filled."""
    copy: torch.Tensor
    """What is read in its stead; contiguous."""
    sharing: tuple[str, ...] = ()
    """Keys of others, of which some share bytes with it or with each other."""


def mark_shared(filled: Sequence[tuple[str, torch.Tensor]], apart: Sequence[ReadApart]) -> dict[int, ReadApart]:
    """By number, the tensors to be filled that share memory; behind all of them, what is read apart anyway."""
    places = [*(tensor for _, tensor in filled), *(one.piece.tensor for one in apart)]
    found = dict(enumerate(apart, len(filled)))
    for group in find_shared(places):
        for at in group:
            if at < len(filled):
                key, tensor = filled[at]
                found[at] = ReadApart(
                    key, piece_of(tensor), tensor.detach().clone(memory_format=torch.contiguous_format)
                )
        for at in group:
            found[at] = replace(found[at], sharing=tuple(found[other].key for other in group if other != at))
    return found


def settle(apart: Sequence[ReadApart]) -> None:
    """Put all in their places; `CheckpointMismatchError` if afterwards one of them is not there."""
    for one in apart:
        put_back(one.piece, one.copy)
    for one in apart:
        if one.sharing and not is_there(one.piece, one.copy):
            raise CheckpointMismatchError(
                f"filling tensor {one.key!r}: it shares memory with {named(one.sharing, 3)}, "
                "for which the checkpoint holds other values, expected the same, since one place keeps one value; load "
                "into a tensor of its own (untie the model's weights), or ask for one of them"
            )
