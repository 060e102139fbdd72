"""Descriptions of what each rank gives and wants, gathered and made into moves, and of the options that it plans with.

A model has many tensors of few kinds. So a rank describes each *kind* once, and names the kind of each tensor:
``{"kinds": [kind, ...], "tensors": {name: number of the kind}}``, for either side. A kind is ``[dtype, global shape,
reduction, shards]``; empty shards are left out. All ranks make the same moves from the same descriptions, in order of
names, and tensors that all ranks describe alike have the very same layouts.

Plans are functions of their arguments, so options must be equal everywhere, or ranks would plan differently and never
meet. All but one: ``max_staging_bytes`` may follow from each rank's own free memory. The least of all caps holds for
every rank, and a rank without one does as the others.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from remesh.comm.agreement import check_alike
from remesh.comm.gather import Group, gather_from
from remesh.foundation.errors import PlanError
from remesh.foundation.options import check_options
from remesh.foundation.torch_private import never_compiled
from remesh.layout import Box, Layout, Shard, row_major_strides
from remesh.layout.from_torch import Piece, dtype_name, piece_of, why_without_memory
from remesh.resharding.model.tasks import Missing, SumOrder, TensorMove, travelling_dtype
from remesh.resharding.planning.planner import AUTO, DEFAULT_CHUNK_BYTES, check_request
from remesh.resharding.planning.transfer import PlanOptions

DOING = "describing the tensors to reshard"
_GATHERING = "gathering the moves of tensors"
_PLANNING = "resharding"
_CAP: Final = "max_staging_bytes"
_LONG = ("host_of", "network")
"""Sent as digests: they are as long as the group is large."""

Tensors = Mapping[str, torch.Tensor | Piece]
"""Tensors by name: a DTensor of any mesh, a plain tensor (all of it), or a local tensor with its boxes."""


def describe_all(give: Mapping[str, Piece], take: Mapping[str, Piece]) -> dict[str, Any]:
    """What this rank gives and wants, as JSON values."""
    return {
        "host": socket.gethostname(),
        "give": _describe(give),
        "take": _describe(take),
    }


def check_tensors(tensors: object, side: str) -> None:
    """Raise `PlanError` unless these are tensors by name; ``side`` is what the caller knows them as."""
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        found = (
            f"a mapping with keys such as {next(iter(tensors))!r}"
            if isinstance(tensors, Mapping)
            else f"a {type(tensors).__name__}"
        )
        raise PlanError(
            f"{DOING}: {side} is {found[:80]}, expected a mapping from names to tensors, empty on a rank that has none "
            "of them; name each tensor as the other ranks do"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor | Piece):
            raise PlanError(
                f"{DOING}: {side}[{name!r}] is a {type(tensor).__name__}, expected a DTensor, a tensor or a Piece; "
                "convert it first, or leave it out"
            )
        if isinstance(tensor, torch.Tensor) and (is_lazy(tensor) or tensor.is_nested):
            raise PlanError(
                f"{DOING}: {side}[{name!r}] is {why_without_memory(tensor)}, expected a dense tensor with memory; "
                "materialise it first, or leave it out"
            )


def pieces_of(tensors: Tensors) -> dict[str, Piece]:
    """What this rank holds of each tensor."""
    with torch.no_grad():  # once for all of them
        return {name: piece_of(tensor) for name, tensor in tensors.items()}


@never_compiled
def gather_moves(give: Tensors, take: Tensors, group: Group = None) -> list[TensorMove]:
    """The moves of all tensors that any rank wants, by name; the same on every rank.

    Called by every rank of the group; blocks until all have called it. Holders are ranks of the group.
    """
    return moves_of(gather_from(lambda: describe_all(pieces_of(give), pieces_of(take)), group, _GATHERING))


def hosts_of(described: Sequence[Any]) -> dict[int, str]:
    """The host of every rank, as it described itself."""
    return {rank: each["host"] for rank, each in enumerate(described)}


def _describe(pieces: Mapping[str, Piece]) -> dict[str, Any]:
    number_of: dict[tuple[Any, ...], int] = {}
    tensors = {}
    for name in sorted(pieces):
        piece = pieces[name]
        kind = (piece.tensor.dtype, piece.global_shape, piece.partial, piece.shards)
        tensors[name] = number_of.setdefault(kind, len(number_of))
    return {"kinds": [_describe_kind(*kind) for kind in number_of], "tensors": tensors}


def _describe_kind(
    dtype: torch.dtype, global_shape: Sequence[int], partial: str | None, shards: Sequence[Shard]
) -> list[Any]:
    told = []
    for shard in shards:
        if not shard.box.is_empty:
            plain = shard.strides == row_major_strides(shard.box.shape)
            strides = None if plain or shard.strides is None else list(shard.strides)
            told.append([list(shard.box.start), list(shard.box.stop), shard.offset, strides, shard.addend])
    return [dtype_name(dtype), list(global_shape), partial, told]


def moves_of(described: Sequence[Any]) -> list[TensorMove]:
    """The moves that the descriptions of all ranks, by rank, ask for; those of tensors of one kind share layouts."""
    held, wanted = _by_name(described, "give"), _by_name(described, "take")
    known: dict[tuple[int, ...], tuple[Layout, Layout]] = {}
    moves = []
    for name in sorted(wanted):
        givers, takers = held.get(name, []), wanted[name]
        # Each kind of each rank is one object. Others may have equal layouts, but keep another dtype: these stay apart.
        kinds = tuple(map(id, (*givers, *takers)))
        if kinds not in known:
            _check_agreement(name, givers, takers)
            known[kinds] = _layouts_of(givers, takers)
        moves.append(TensorMove(name, *known[kinds]))
    return moves


@dataclass(frozen=True, slots=True)
class _TensorKind:
    """One rank's description of some tensors on one side."""

    rank: int
    dtype: str
    global_shape: tuple[int, ...]
    partial: str | None
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, rank: int, dtype: str, shape: Sequence[int], partial: str | None, told: Sequence[Any]) -> _TensorKind:
        shards = tuple(
            Shard(rank, Box(tuple(start), tuple(stop)), offset, None if strides is None else tuple(strides), addend)
            for start, stop, offset, strides, addend in told
        )
        return cls(rank, dtype, tuple(shape), partial, shards)


def _by_name(described: Sequence[Any], side: str) -> dict[str, list[_TensorKind]]:
    """The kinds of each tensor, by rank."""
    found: dict[str, list[_TensorKind]] = {}
    for rank, each in enumerate(described):
        kinds = [_TensorKind.of(rank, *told) for told in each[side]["kinds"]]
        for name, number in each[side]["tensors"].items():
            found.setdefault(name, []).append(kinds[number])
    return found


def _check_agreement(name: str, givers: Sequence[_TensorKind], takers: Sequence[_TensorKind]) -> None:
    """All must give the same global shape; each side the same dtype and reduction."""
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


def _layouts_of(givers: Sequence[_TensorKind], takers: Sequence[_TensorKind]) -> tuple[Layout, Layout]:
    """How tensors of these kinds are held and wanted, in the dtype that travels if there is one."""
    src, dst = (givers or takers)[0], takers[0]
    travelling = travelling_dtype(src.dtype, dst.dtype) if src.partial is None else None
    return _layout(src, givers, travelling), _layout(dst, takers, travelling)


def _layout(sample: _TensorKind, told: Sequence[_TensorKind], travelling: str | None) -> Layout:
    shards = tuple(shard for each in told for shard in each.shards)
    return Layout(sample.global_shape, shards, travelling or sample.dtype, sample.partial if told else None)


def check_plan_options(options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for an unknown option or one of the wrong type, `PlanError` for a wrong value."""
    check_options(_PLANNING, options, PlanOptions)
    check_request(_PLANNING, options.get("chunk_bytes", DEFAULT_CHUNK_BYTES), options.get("strategy", AUTO))
    cap = options.get(_CAP)
    if cap is not None and cap < 0:
        raise PlanError(f"{_PLANNING}: {_CAP} is {cap}, expected a number of bytes; raise the cap, or leave it out")


def tell_options(options: PlanOptions) -> dict[str, Any]:
    """What this rank sends the others of its options, as short JSON; equal exactly when the options mean the same."""
    told = {name: _in_full(options, name) for name in sorted(PlanOptions.__annotations__)}
    for name in _LONG:
        if told[name] is not None:
            told[name] = hashlib.sha256(json.dumps(told[name], sort_keys=True).encode()).hexdigest()[:16]
    return told


def settle_options(told: Sequence[Mapping[str, Any]], options: PlanOptions, group: Group) -> PlanOptions:
    """The options that all ranks plan with, from what each has sent.

    Called by every rank of the group; raises `OptionError` on all of them where options differ.
    """
    caps = [each[_CAP] for each in told if each[_CAP] is not None]
    rest = [{name: value for name, value in each.items() if name != _CAP} for each in told]
    check_alike(rest, lambda name: _in_full(options, name), group, _PLANNING)
    settled = options.copy()
    if caps:
        settled[_CAP] = min(caps)
    return settled


def _in_full(options: PlanOptions, name: str) -> Any:
    """An option as JSON, with its default where that has a name."""
    if name == "host_of":
        hosts = options.get("host_of")
        return {str(rank): hosts[rank] for rank in sorted(hosts)} if hosts else None
    if name == "network":
        network = options.get("network")
        return network.to_json() if network is not None else None
    if name == "missing":
        return options.get("missing", Missing.REFUSE).value
    if name == "sum_order":
        return options.get("sum_order", SumOrder.ASCENDING).value
    if name == "strategy":
        return options.get("strategy", AUTO)
    number = options.get("chunk_bytes") if name == "chunk_bytes" else options.get(_CAP)
    return None if number is None else int(number)
