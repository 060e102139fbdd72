"""Checks of a rank's pieces against the plan, and of their memory.

A piece is right when it has the boxes, the dtype and the shape that the plan was made for, and its boxes lie in dense
memory in which no two elements share a place. Pieces of both sides may share memory: what is given from a place into
which something else is taken *clashes*, and is given from a copy. Several names may be taken into one memory, as those
of tied weights are; then each is taken into a copy, and must be what is there when all are put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard, check_places, has_own_places
from remesh.layout.from_torch import Piece, dtype_name, find_read_only, why_without_memory
from remesh.layout.torch_memory import end_of, find_shared, places_of
from remesh.resharding.model.tasks import TensorMove, travelling_dtype


def check_pieces(moves: Sequence[TensorMove], give: Mapping[str, Piece], take: Mapping[str, Piece], rank: int) -> None:
    """Raise `PlanError` unless these pieces are what the moves expect of this rank."""
    for move in moves:
        for layout, pieces, verb in ((move.src, give, "gives"), (move.dst, take, "takes")):
            _check_piece(move.name, layout, pieces.get(move.name), rank, verb)
    unplanned = sorted(take.keys() - {move.name for move in moves})
    if any(_boxes(take[name].shards) for name in unplanned):
        raise PlanError(
            f"resharding {len(moves)} tensors: rank {rank} wants {unplanned[0]!r}, which the plan does not move; "
            "plan again with it"
        )


def _check_piece(name: str, layout: Layout, piece: Piece | None, rank: int, verb: str) -> None:
    doing = f"resharding tensor {name!r}"
    planned = _boxes(layout.shards_of(rank))
    found = _boxes(piece.shards) if piece is not None else []
    if planned != found:
        raise PlanError(
            f"{doing}: by the plan rank {rank} {verb} {len(planned)} boxes {_list(planned)}, found {len(found)} boxes "
            f"{_list(found)}; use the plan with the tensors it was made for"
        )
    if piece is None or not found:
        return
    tensor = piece.tensor
    kept = dtype_name(tensor.dtype)
    fits = travelling_dtype(*((kept, layout.dtype) if verb == "gives" else (layout.dtype, kept)))
    if fits is None or (layout.partial and kept != layout.dtype) or piece.global_shape != layout.global_shape:
        raise PlanError(
            f"{doing}: by the plan rank {rank} {verb} {layout.dtype} of global shape {layout.global_shape}, found "
            f"{kept} of {piece.global_shape}; use the plan with the tensors it was made for"
        )
    if piece.partial != layout.partial:
        raise PlanError(
            f"{doing}: by the plan rank {rank} {verb} {_whole_or(layout.partial)}, found {_whole_or(piece.partial)}; "
            "use the plan with the tensors it was made for"
        )
    _check_is_dense(doing, tensor, rank)
    _check_memory(doing, piece, rank)


def check_memories(pieces: Mapping[str, Piece], rank: int) -> None:
    """Raise `PlanError` unless the boxes of all pieces lie in memory that can be read and written."""
    known: set[tuple[object, ...]] = set()
    for name, piece in pieces.items():
        if all(shard.box.is_empty for shard in piece.shards):
            continue
        doing = f"resharding tensor {name!r}"
        _check_is_dense(doing, piece.tensor, rank)
        # Many tensors of a model lie alike in their memory, and are right or wrong together.
        lies = (piece.tensor.shape, piece.tensor.stride(), piece.global_shape, piece.shards)
        if lies not in known:
            _check_memory(doing, piece, rank)
            known.add(lies)


def check_writable(pieces: Mapping[str, Piece], rank: int) -> None:
    """Raise `PlanError` for memory that is to be filled and may not be written, such as a read-only map of a file."""
    if (name := find_read_only((name, piece.tensor) for name, piece in pieces.items())) is not None:
        raise PlanError(
            f"resharding tensor {name!r}: on rank {rank} its memory can only be read, as that of a file mapped with "
            "mode 'r', expected memory that can be written; map it with mode 'c', or take into a copy"
        )


def _check_is_dense(doing: str, tensor: torch.Tensor, rank: int) -> None:
    found = "quantized, with a scale of its own" if tensor.is_quantized else why_without_memory(tensor)
    if found is not None:
        raise PlanError(
            f"{doing}: on rank {rank} it is {found}, expected a dense tensor with memory; materialise it first, or "
            "give the tensors that it is made of"
        )


def _check_memory(doing: str, piece: Piece, rank: int) -> None:
    tensor = piece.tensor
    if not has_own_places(tensor.shape, tensor.stride()):
        raise PlanError(
            f"{doing}: on rank {rank} elements of its local tensor overlap in memory, with strides {tensor.stride()} "
            f"for shape {tuple(tensor.shape)}, expected distinct memory for each; make it contiguous first"
        )
    check_places(piece.shards, piece.global_shape, f"{doing} on rank {rank}", tensor.numel())


def _boxes(shards: Sequence[Shard]) -> list[tuple[Box, int]]:
    """Boxes with elements, and which addend each is."""
    return sorted((shard.box, shard.addend) for shard in shards if not shard.box.is_empty)


def _list(boxes: Sequence[tuple[Box, int]]) -> str:
    return ", ".join(str(box) for box, _ in boxes[:4]) + (", ..." if len(boxes) > 4 else "") or "(none)"


def _whole_or(partial: str | None) -> str:
    return "whole values" if partial is None else f"partial sums ({partial})"


class _Span(NamedTuple):
    """Addresses that a tensor may touch."""

    start: int
    stop: int
    name: str


def find_clashes(give: Mapping[str, Piece], take: Mapping[str, Piece]) -> set[str]:
    """Names that are given from memory into which something else is taken: they must be given from a copy.

    A tensor that is given and taken in the same layout and memory needs no copy: each holder of a box keeps it.
    """
    taken = sorted(_span(name, piece) for name, piece in take.items() if piece.tensor.numel())
    given = sorted(_span(name, piece) for name, piece in give.items() if piece.tensor.numel())
    clashing = set()
    under_way: list[_Span] = []
    at = 0
    for span in given:
        while at < len(taken) and taken[at].start < span.stop:
            under_way.append(taken[at])
            at += 1
        under_way = [other for other in under_way if other.stop > span.start]
        for other in under_way:
            stays = other.name == span.name and _lie_alike(give[span.name], take[span.name])
            if other.start < span.stop and not stays:
                clashing.add(span.name)
    return clashing


def find_sharing(take: Mapping[str, Piece]) -> list[str]:
    """Names that are taken into memory which others are taken into as well: all of them must get the same values."""
    owners = [(name, place) for name, piece in take.items() for place in places_of(piece)]
    found: set[str] = set()
    for group in find_shared([place for _, place in owners]):
        names = {owners[at][0] for at in group}
        found |= names if len(names) > 1 else set()
    return sorted(found)


def _span(name: str, piece: Piece) -> _Span:
    tensor = piece.tensor
    return _Span(tensor.data_ptr(), end_of(tensor), name)


def _lie_alike(given: Piece, taken: Piece) -> bool:
    """Whether the same boxes are in the same memory."""
    a, b = given.tensor, taken.tensor
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and given.shards == taken.shards
    )
