"""What does a user call? `reshard`: fill these tensors from those, whatever layouts they are in.

Called by every rank of a group, in steps:

1. Every rank tells the others which boxes it gives and wants of which tensors (`gather_moves`), and its host.
2. Every rank computes the same plan from that (`remesh.reshard.plan_reshard`).
3. The plan is carried out (`remesh.reshard.run_plan`), after its digest was compared.

The layouts need no common mesh: a rank that has nothing of a tensor leaves it out. All errors of the description are
raised on all ranks alike, before anything moves.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remesh.errors import PlanError
from remesh.layout import Box, Layout, Shard, row_major_strides
from remesh.layout.from_torch import Piece, dtype_name, piece_of
from remesh.reshard.exchange import Group, gather_from
from remesh.reshard.planner import DEFAULT_CHUNK_BYTES, plan_reshard
from remesh.reshard.run import Moved, run_plan
from remesh.reshard.tasks import Missing, TensorMove, compute_missing_boxes

__all__ = ["Moved", "compute_missing_boxes", "gather_moves", "reshard"]

Tensors = Mapping[str, torch.Tensor | Piece]
"""Tensors by name: a DTensor of any mesh, a plain tensor (all of it), or a local tensor with its boxes."""

_DOING = "describing the tensors to reshard"


def reshard(
    give: Tensors,
    take: Tensors,
    *,
    group: Group = None,
    host_of: Mapping[int, str] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    missing: Missing = Missing.REFUSE,
) -> Moved:
    """Fill the tensors of ``take`` in place with the values of those of ``give``; what was moved.

    Called by every rank of the group; blocks until this rank has given and taken everything. Either side may lack on
    a rank; tensors with one name are parts or replicas of one tensor. ``host_of`` maps ranks of the group to hosts
    that share a NIC; by default the machine's own name counts. Raises the same error on all ranks: `PlanError` when
    something wanted is held by nobody (unless ``missing`` says to leave it) or shapes or dtypes clash, `PeerError`
    when a rank dies.
    """
    described = _gather_descriptions(give, take, group)
    moves = _moves_of(described)
    hosts = host_of if host_of is not None else {rank: each["host"] for rank, each in enumerate(described)}
    plan = plan_reshard(moves, hosts, chunk_bytes=chunk_bytes, missing=missing)
    taken = {move.name for move in moves}
    return run_plan(plan, _pieces(give, taken), _pieces(take, taken), group)


def gather_moves(give: Tensors, take: Tensors, group: Group = None) -> list[TensorMove]:
    """The moves of all tensors that anybody wants, by name; the same on every rank.

    Called by every rank of the group; blocks until all have called it. Holders are ranks of the group.
    """
    return _moves_of(_gather_descriptions(give, take, group))


def _gather_descriptions(give: Tensors, take: Tensors, group: Group) -> list[Any]:
    def describe() -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "give": [_describe(name, piece_of(give[name])) for name in sorted(give)],
            "take": [_describe(name, piece_of(take[name])) for name in sorted(take)],
        }

    return gather_from(describe, group, _DOING)


def _pieces(tensors: Tensors, names: set[str]) -> dict[str, Piece]:
    return {name: piece_of(tensor) for name, tensor in tensors.items() if name in names}


def _describe(name: str, piece: Piece) -> list[Any]:
    """``[name, dtype, global shape, reduction, shards as JSON text]``; empty shards are left out.

    The shards are a text of their own because many tensors share it, and text is quick to compare.
    """
    shards = []
    for shard in piece.shards:
        if not shard.box.is_empty:
            plain = shard.strides == row_major_strides(shard.box.shape)
            strides = None if plain or shard.strides is None else list(shard.strides)
            shards.append([list(shard.box.start), list(shard.box.stop), shard.offset, strides, shard.addend])
    text = json.dumps(shards, separators=(",", ":"))
    return [name, dtype_name(piece.tensor.dtype), list(piece.global_shape), piece.partial, text]


def _moves_of(described: Sequence[Any]) -> list[TensorMove]:
    make = _LayoutMaker()
    held, wanted = _by_name(described, "give"), _by_name(described, "take")
    moves = []
    for name in sorted(wanted):
        givers = held.get(name, [])
        _check_agreement(name, [*(("gives", each) for each in givers), *(("wants", each) for each in wanted[name])])
        sample = wanted[name][0]
        moves.append(TensorMove(name, make.layout(sample, givers), make.layout(sample, wanted[name])))
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
    """For each tensor what every rank says of it, by rank."""
    found: dict[str, list[_Description]] = {}
    for rank, each in enumerate(described):
        for name, dtype, shape, partial, shards in each[side]:
            found.setdefault(name, []).append(_Description(rank, dtype, tuple(shape), partial, shards))
    return found


def _check_agreement(name: str, told: Sequence[tuple[str, _Description]]) -> None:
    """All must say the same of dtype, global shape and reduction."""
    first_verb, first = told[0]
    for verb, other in told:
        for what, mine, theirs in (
            ("dtype", first.dtype, other.dtype),
            ("global shape", first.global_shape, other.global_shape),
            ("reduction", first.partial, other.partial),
        ):
            if mine != theirs:
                raise PlanError(
                    f"{_DOING}: tensor {name!r} has {what} {mine} where rank {first.rank} {first_verb} it but {theirs} "
                    f"where rank {other.rank} {verb} it, expected equal; make both sides the same tensor"
                )


class _LayoutMaker:
    """Makes layouts from descriptions; equal descriptions give one object."""

    def __init__(self) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._shards: dict[tuple[int, str], tuple[Shard, ...]] = {}

    def layout(self, sample: _Description, told: Sequence[_Description]) -> Layout:
        """The layout that ``told`` describes, of a tensor like ``sample``."""
        head = (sample.global_shape, sample.dtype, sample.partial)
        key = (head, tuple((each.rank, each.shards) for each in told))
        if key not in self._layouts:
            shards = tuple(shard for each in told for shard in self._shards_of(each))
            self._layouts[key] = Layout(sample.global_shape, shards, sample.dtype, sample.partial)
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
