"""Where in this rank's memory is a box? Pieces of a state seen as regions that can be copied and sent.

Definitions. The *region* of a box on a rank is the strided view of the rank's memory that holds it. Elements are seen
as integers of their size, so they move bit by bit whatever they mean; 16-byte elements are pairs of 8-byte ones.
A message is *direct* when its chunk is a single contiguous region on a device that the transport reaches; any other
is *staged*: packed into, or unpacked from, a byte buffer.

A piece whose tensor is not contiguous is worked on as a contiguous copy; `Memory.flush` writes the copies back.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from remesh.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.layout.from_torch import Piece, dtype_name
from remesh.reshard.plan import Plan
from remesh.reshard.stream import Chunk, Part

_OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Memory:
    """One side, given or taken, of what this rank keeps of a state."""

    def __init__(self, pieces: Mapping[str, Piece], names: Sequence[str]) -> None:
        self._pieces = pieces
        self._names = names
        """Name of each tensor of the plan, by its number."""
        self._flat: dict[int, torch.Tensor] = {}
        self._to_write_back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def regions(self, tensor: int, box: Box) -> list[torch.Tensor]:
        """Every region of this rank's memory that holds the box, which lies in a shard; views in the box's shape."""
        flat = self._flat.get(tensor)
        piece = self._pieces[self._names[tensor]]
        if flat is None:
            flat = self._flat[tensor] = self._flatten(piece.tensor)
        width = 2 if piece.tensor.element_size() == 16 else 1
        found = []
        for shard in piece.shards:
            # The same as Box.contains and Shard.offset_of without their checks: this runs for every part.
            at, strides = shard.box.start, shard.strides
            assert strides is not None
            if not all(map(operator.le, at, box.start)) or not all(map(operator.ge, shard.box.stop, box.stop)):
                continue
            start = shard.offset + sum(map(operator.mul, map(operator.sub, box.start, at), strides))
            start = flat.storage_offset() + start * width
            if width == 1:
                found.append(flat.as_strided(box.shape, strides, start))
            else:
                wide = (*(stride * width for stride in strides), 1)
                found.append(flat.as_strided((*box.shape, width), wide, start))
        return found

    def direct(self, chunk: Chunk, device: torch.device) -> torch.Tensor | None:
        """The memory of a whole chunk as bytes, if it is one contiguous region on this device, kept once."""
        if len(chunk.parts) != 1:
            return None
        regions = self.regions(chunk.parts[0].tensor, chunk.parts[0].box)
        if len(regions) != 1 or regions[0].device.type != device.type or not regions[0].is_contiguous():
            return None
        return _as_run(regions[0]).view(torch.uint8)

    def pack(self, chunk: Chunk, staged: torch.Tensor) -> None:
        """Write a chunk from this memory into a byte buffer."""
        for part, field in _fields(chunk, staged):
            region = self.regions(part.tensor, part.box)[0]
            field.view(region.dtype).view(region.shape).copy_(region)

    def unpack(self, chunk: Chunk, staged: torch.Tensor) -> None:
        """Write a chunk from a byte buffer into this memory, wherever it keeps it."""
        for part, field in _fields(chunk, staged):
            for region in self.regions(part.tensor, part.box):
                region.copy_(field.view(region.dtype).view(region.shape))

    def flush(self) -> None:
        """Write contiguous copies back into the tensors they stand for."""
        for tensor, copy in self._to_write_back:
            tensor.copy_(copy)

    def _flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            copy = tensor.resolve_conj().resolve_neg().contiguous()
            self._to_write_back.append((tensor, copy))
            tensor = copy
        return _as_run(tensor).view(_OPAQUE[tensor.element_size()])


def _as_run(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dim of stride 1, which ``view(-1)`` does not promise for a single element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _fields(chunk: Chunk, staged: torch.Tensor) -> list[tuple[Part, torch.Tensor]]:
    fields = []
    start = 0
    for part in chunk.parts:
        fields.append((part, staged[start : start + part.nbytes]))
        start += part.nbytes
    return fields


def check_pieces(plan: Plan, give: Mapping[str, Piece], take: Mapping[str, Piece], rank: int) -> None:
    """Raise `PlanError` unless this rank's pieces are what the plan says that it holds and wants."""
    for move in plan.moves:
        for layout, pieces, verb in ((move.src, give, "holds"), (move.dst, take, "wants")):
            _check_piece(move.name, layout, pieces.get(move.name), rank, verb)
    unplanned = sorted(take.keys() - {move.name for move in plan.moves})
    if any(_boxes(take[name].shards) for name in unplanned):
        raise PlanError(
            f"resharding {len(plan.moves)} tensors: rank {rank} wants {unplanned[0]!r}, which the plan does not move; "
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
    if dtype_name(tensor.dtype) != layout.dtype or piece.global_shape != layout.global_shape:
        raise PlanError(
            f"{doing}: by the plan rank {rank} {verb} {layout.dtype} of global shape {layout.global_shape}, found "
            f"{dtype_name(tensor.dtype)} of {piece.global_shape}; use the plan with the tensors it was made for"
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise PlanError(
            f"{doing}: on rank {rank} it is {tensor.layout} on device {tensor.device}, expected a dense tensor with "
            "memory; materialise it first"
        )
    for shard in piece.shards:
        reach = _reach(shard)
        if reach > tensor.numel():
            raise PlanError(
                f"{doing}: on rank {rank} box {shard.box} reaches to element {reach} of a local tensor that has "
                f"{tensor.numel()}; correct the offset and strides of the piece"
            )


def _reach(shard: Shard) -> int:
    """One past the last element of the holder's buffer that belongs to the shard."""
    if shard.box.is_empty:
        return 0
    assert shard.strides is not None
    return 1 + shard.offset + sum((n - 1) * s for n, s in zip(shard.box.shape, shard.strides, strict=True))


def _boxes(shards: Sequence[Shard]) -> list[Box]:
    return sorted(shard.box for shard in shards if not shard.box.is_empty)


def _list(boxes: Sequence[Box]) -> str:
    return ", ".join(map(str, boxes[:4])) + (", ..." if len(boxes) > 4 else "") or "(none)"


@dataclass(frozen=True, slots=True, order=True)
class _Span:
    """Addresses that a tensor may touch."""

    start: int
    stop: int
    name: str


def unalias(give: Mapping[str, Piece], take: Mapping[str, Piece]) -> dict[str, Piece]:
    """What is given, with copies in place of the tensors whose memory something else is taken into.

    A tensor that is given and taken in the same layout and memory needs no copy: whoever holds a box keeps it.
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
            if other.start < span.stop and not _same(give[span.name], take[other.name], span.name == other.name):
                clashing.add(span.name)
    return {
        name: replace(piece, tensor=piece.tensor.clone()) if name in clashing else piece for name, piece in give.items()
    }


def _span(name: str, piece: Piece) -> _Span:
    tensor = piece.tensor
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), name)


def _same(given: Piece, taken: Piece, same_name: bool) -> bool:
    a, b = given.tensor, taken.tensor
    return (
        same_name
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and given.shards == taken.shards
    )
