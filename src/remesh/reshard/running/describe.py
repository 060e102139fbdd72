"""What does every rank give and want? Descriptions of tensors, gathered and made into moves.

A description of one tensor on one rank is ``[name, dtype, global shape, reduction, shards as JSON text]``; empty shards
are left out. The shards are a text of their own because many tensors share it, and text is quick to compare. All ranks
make the same moves from the same descriptions, in order of names.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remesh.comm.gather import Group, gather_from
from remesh.errors import PlanError
from remesh.layout import Box, Layout, Shard, row_major_strides
from remesh.layout.from_torch import Piece, dtype_name, piece_of
from remesh.reshard.model.casts import travelling_dtype
from remesh.reshard.model.tasks import TensorMove

DOING = "describing the tensors to reshard"
_GATHERING = "gathering the moves of tensors"

Tensors = Mapping[str, torch.Tensor | Piece]
"""Tensors by name: a DTensor of any mesh, a plain tensor (all of it), or a local tensor with its boxes."""


def describe_all(give: Mapping[str, Piece], take: Mapping[str, Piece]) -> dict[str, Any]:
    """What this rank has to say, as JSON values."""
    return {
        "host": socket.gethostname(),
        "give": [_describe(name, give[name]) for name in sorted(give)],
        "take": [_describe(name, take[name]) for name in sorted(take)],
    }


def check_tensors(tensors: object, side: str) -> None:
    """Raise `PlanError` unless these are tensors by name; ``side`` is what the caller knows them as."""
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        found = (
            f"a mapping with keys such as {next(iter(tensors))!r}" if isinstance(tensors, Mapping) else repr(tensors)
        )
        raise PlanError(
            f"{DOING}: {side} is {found[:80]}, expected a mapping from names to tensors, empty on a rank that has none "
            "of them; name each tensor as the other ranks do"
        )


def pieces_of(tensors: Tensors) -> dict[str, Piece]:
    """What this rank holds of each tensor."""
    return {name: piece_of(tensor) for name, tensor in tensors.items()}


def gather_moves(give: Tensors, take: Tensors, group: Group = None) -> list[TensorMove]:
    """The moves of all tensors that anybody wants, by name; the same on every rank.

    Called by every rank of the group; blocks until all have called it. Holders are ranks of the group.
    """
    return moves_of(gather_from(lambda: describe_all(pieces_of(give), pieces_of(take)), group, _GATHERING))


def hosts_of(described: Sequence[Any]) -> dict[int, str]:
    """The host that every rank told."""
    return {rank: each["host"] for rank, each in enumerate(described)}


def _describe(name: str, piece: Piece) -> list[Any]:
    shards = []
    for shard in piece.shards:
        if not shard.box.is_empty:
            plain = shard.strides == row_major_strides(shard.box.shape)
            strides = None if plain or shard.strides is None else list(shard.strides)
            shards.append([list(shard.box.start), list(shard.box.stop), shard.offset, strides, shard.addend])
    text = json.dumps(shards, separators=(",", ":"))
    return [name, dtype_name(piece.tensor.dtype), list(piece.global_shape), piece.partial, text]


def moves_of(described: Sequence[Any]) -> list[TensorMove]:
    """The moves that the descriptions of all ranks, by rank, ask for."""
    make = _LayoutMaker()
    held, wanted = _by_name(described, "give"), _by_name(described, "take")
    moves = []
    for name in sorted(wanted):
        givers, takers = held.get(name, []), wanted[name]
        _check_agreement(name, givers, takers)
        src, dst = (givers or takers)[0], takers[0]
        travelling = travelling_dtype(src.dtype, dst.dtype)
        if src.partial is None and travelling is not None:  # layouts that many tensors share are made once
            moves.append(TensorMove(name, make.layout(src, givers, travelling), make.layout(dst, takers, travelling)))
        else:
            moves.append(TensorMove(name, make.layout(src, givers, src.dtype), make.layout(dst, takers, dst.dtype)))
    return moves


@dataclass(frozen=True, slots=True)
class _Description:
    """What one rank says of one tensor on one side."""

    rank: int
    dtype: str
    global_shape: tuple[int, ...]
    partial: str | None
    shards: str
    """As JSON text."""


def _by_name(described: Sequence[Any], side: str) -> dict[str, list[_Description]]:
    """The descriptions of each tensor, by rank."""
    found: dict[str, list[_Description]] = {}
    for rank, each in enumerate(described):
        for name, dtype, shape, partial, shards in each[side]:
            found.setdefault(name, []).append(_Description(rank, dtype, tuple(shape), partial, shards))
    return found


def _check_agreement(name: str, givers: Sequence[_Description], takers: Sequence[_Description]) -> None:
    """All must say the same global shape; each side the same dtype and reduction."""
    for side, others, verb in ((givers, givers, "gives"), (takers, takers, "wants"), (givers, takers, "wants")):
        for other in others if side else ():
            first = side[0]
            differ: list[tuple[str, object, object]] = [("global shape", first.global_shape, other.global_shape)]
            if side is others:
                differ += [("dtype", first.dtype, other.dtype), ("reduction", first.partial, other.partial)]
            for what, mine, theirs in differ:
                if mine != theirs:
                    raise PlanError(
                        f"{DOING}: tensor {name!r} has {what} {mine} where rank {first.rank} "
                        f"{'wants' if side is takers else 'gives'} it but {theirs} where rank {other.rank} {verb} it, "
                        "expected equal; make both the same tensor"
                    )


class _LayoutMaker:
    """Makes layouts from descriptions; equal descriptions give one object."""

    def __init__(self) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._shards: dict[tuple[int, str], tuple[Shard, ...]] = {}

    def layout(self, sample: _Description, told: Sequence[_Description], dtype: str) -> Layout:
        """The layout that ``told`` describes, of a tensor like ``sample`` that travels as ``dtype``."""
        partial = sample.partial if told else None
        head = (sample.global_shape, dtype, partial)
        key = (head, tuple((each.rank, each.shards) for each in told))
        if key not in self._layouts:
            shards = tuple(shard for each in told for shard in self._shards_of(each))
            self._layouts[key] = Layout(sample.global_shape, shards, dtype, partial)
        return self._layouts[key]

    def _shards_of(self, told: _Description) -> tuple[Shard, ...]:
        key = (told.rank, told.shards)
        if key not in self._shards:
            self._shards[key] = tuple(
                Shard(
                    told.rank,
                    Box(tuple(start), tuple(stop)),
                    offset,
                    None if strides is None else tuple(strides),
                    addend,
                )
                for start, stop, offset, strides, addend in json.loads(told.shards)
            )
        return self._shards[key]
