"""Memory regions of a rank's pieces: strided views of boxes that can be copied and sent.

Definitions. The *region* of a box on a rank is the strided view of the rank's memory that holds it. Elements that
travel in the dtype in which they are kept are seen as integers of their size, so they move bit by bit whatever they
mean; 16-byte elements are pairs of 8-byte ones. Elements that are kept in another dtype are seen as they are, and cast
where they are packed or unpacked.

A message is *direct* when its chunk is a single contiguous region on a device that the transport reaches, and is not
cast; any other is *staged*: packed into, or unpacked from, a byte buffer. What was found out for a chunk is kept, so
the second run with one memory looks nothing up.

A piece whose tensor is not contiguous, or shares memory with another one that is taken, is worked on as a contiguous
copy; `Regions.flush` writes the copies back, and returns which of those that share memory are not what they should be.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece, torch_dtype
from remesh.layout.torch_memory import is_there, put_back
from remesh.resharding.model.tasks import Alike, TensorMove, unstack
from remesh.resharding.schedule.chunks import Chunk

_OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring parts of a chunk that are seen in one dtype, and their regions in memory."""

    start: int
    """First byte in a staged message."""
    stop: int
    dtype: torch.dtype
    """Opaque, or the dtype that travels when the regions have another."""
    regions: tuple[tuple[tuple[torch.Tensor, ...], ...], ...]
    """Per part and tensor; all those of one part have one shape."""

    def parts(self, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Each tensor's share of a staged message, in the shape of its regions, and the regions."""
        sizes = [len(tensors) * tensors[0][0].numel() for tensors in self.regions]
        parts = staged[self.start : self.stop].view(self.dtype).split_with_sizes(sizes)
        for part, tensors in zip(parts, self.regions, strict=True):
            yield from zip(part.view(len(tensors), *tensors[0][0].shape).unbind(), tensors, strict=True)


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A region that is filled from another one of this rank."""

    taken: torch.Tensor
    given: torch.Tensor
    by_way_of: torch.dtype | None = None
    """Dtype that the values go through when both ends have another one."""

    def run(self) -> None:
        """Copy what is there now."""
        self.taken.copy_(self.given if self.by_way_of is None else self.given.to(self.by_way_of))


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """One tensor as it is kept."""

    flat: torch.Tensor
    """All of it as one contiguous dim, in its own dtype."""
    packed: torch.Tensor
    """The same as it is packed: opaque, unless it is cast."""
    width: int
    """Elements of ``packed`` for each element of ``flat``."""
    shards: tuple[Shard, ...]
    """Where in ``flat`` boxes are."""


class Regions:
    """One side, given or taken, of what this rank keeps of a state.

    A move may stand for several tensors that are ``alike`` (`remesh.resharding.model.tasks`).
    """

    def __init__(
        self,
        pieces: Mapping[str, Piece],
        moves: Sequence[TensorMove],
        alike: Alike | None = None,
        sharing: Collection[str] = (),
    ) -> None:
        self._pieces = pieces
        self._sharing = sharing
        """Names of the pieces that share memory."""
        self._names = [(alike or {}).get(move.name, (move.name,)) for move in moves]
        """Names of the tensors that each move stands for."""
        self._dtypes = [torch_dtype(move.src.dtype) for move in moves]
        """Dtype in which the tensors of each move travel."""
        self._is_cast = [
            move.name in pieces and pieces[move.name].tensor.dtype != dtype
            for move, dtype in zip(moves, self._dtypes, strict=True)
        ]
        self._kept: dict[str, _KeptTensor] = {}
        self._direct: dict[int, torch.Tensor | None] = {}
        self._seen: dict[tuple[int, int], tuple[_Stretch, ...]] = {}
        self._copies: dict[str, torch.Tensor] = {}
        """What is worked on in the stead of pieces, by name."""

    def direct(self, number: int, chunk: Chunk, device: torch.device) -> torch.Tensor | None:
        """The memory of chunk ``number`` as bytes, if it is one contiguous region on this device, kept once."""
        if number not in self._direct:
            self._direct[number] = self._find_direct(number, chunk, device)
        return self._direct[number]

    def pack(self, number: int, chunk: Chunk, staged: torch.Tensor, addend: int = -1) -> None:
        """Write chunk ``number`` from this memory into a byte buffer; of partial sums this addend."""
        for run in self._runs_of(number, chunk, addend):
            for part, regions in run.parts(staged):
                part.copy_(regions[0])

    def unpack(self, number: int, chunk: Chunk, staged: torch.Tensor) -> None:
        """Write chunk ``number`` from a byte buffer into this memory, wherever it keeps it."""
        for run in self._runs_of(number, chunk):
            for part, regions in run.parts(staged):
                for region in regions:
                    region.copy_(part)

    def values(self, move: int, box: Box, addend: int = -1) -> list[torch.Tensor]:
        """Every region of the box, which lies in a shard, in the dtype in which it is kept."""
        return [region for regions in self._values_of(move, box, addend) for region in regions]

    def plan_copy(self, source: Regions, move: int, box: Box) -> list[LocalCopy]:
        """What to copy where, to fill every region of the box from another memory of the same tensors."""
        if not self._is_cast[move] and not source._is_cast[move]:
            return [
                LocalCopy(region, given)
                for taken, (given, *_) in zip(self._regions_of(move, box), source._regions_of(move, box), strict=True)
                for region in taken
                if region.data_ptr() != given.data_ptr() or region.stride() != given.stride()
            ]
        # Like everyone else, who gets what travelled.
        by_way_of = self._dtypes[move] if self._is_cast[move] and source._is_cast[move] else None
        return [
            LocalCopy(region, given, by_way_of)
            for taken, (given, *_) in zip(self._values_of(move, box), source._values_of(move, box), strict=True)
            for region in taken
        ]

    def refresh(self) -> None:
        """Bring the contiguous copies up to date with the tensors they stand for."""
        for name, copy in self._copies.items():
            copy.copy_(self._pieces[name].tensor)

    def flush(self) -> list[str]:
        """Write contiguous copies back into the pieces they stand for; names of those that others have written over."""
        for name, copy in self._copies.items():
            put_back(self._pieces[name], copy)
        copied = [name for name in self._sharing if name in self._copies]
        return [name for name in copied if not is_there(self._pieces[name], self._copies[name])]

    def _find_direct(self, number: int, chunk: Chunk, device: torch.device) -> torch.Tensor | None:
        if len(chunk.parts) != 1 or self._is_cast[chunk.parts[0].tensor]:
            return None
        regions = [region for each in self._runs_of(number, chunk)[0].regions[0] for region in each]
        if len(regions) != 1 or regions[0].device != device or not regions[0].is_contiguous():
            return None
        return _as_run(regions[0]).view(torch.uint8)

    def _runs_of(self, number: int, chunk: Chunk, addend: int = -1) -> tuple[_Stretch, ...]:
        """The parts of chunk ``number``, neighbours of one dtype together; looked up once."""
        key = (number, addend)
        if key not in self._seen:
            runs: list[_Stretch] = []
            start = 0
            for part in chunk.parts:
                regions = tuple(self._regions_of(part.tensor, part.box, addend))
                dtype = self._dtypes[part.tensor] if self._is_cast[part.tensor] else regions[0][0].dtype
                stop = start + part.nbytes
                if runs and runs[-1].dtype == dtype:
                    last = runs.pop()
                    runs.append(_Stretch(last.start, stop, dtype, (*last.regions, regions)))
                else:
                    runs.append(_Stretch(start, stop, dtype, (regions,)))
                start = stop
            self._seen[key] = tuple(runs)
        return self._seen[key]

    def _regions_of(self, move: int, box: Box, addend: int = -1) -> list[tuple[torch.Tensor, ...]]:
        """For each tensor of a move its regions as they are packed: opaque, or values where they are cast."""
        kept, of_one = self._kept_in(move, box)
        places = _find_places(kept[0].shards, of_one, kept[0].width, addend)
        return [_views(each.packed, places) for each in kept]

    def _values_of(self, move: int, box: Box, addend: int = -1) -> list[tuple[torch.Tensor, ...]]:
        """The same in the dtype in which they are kept."""
        kept, of_one = self._kept_in(move, box)
        places = _find_places(kept[0].shards, of_one, 1, addend)
        return [_views(each.flat, places) for each in kept]

    def _kept_in(self, move: int, box: Box) -> tuple[list[_KeptTensor], Box]:
        """The tensors that a box of a move is in, all with the same shards, and its box in each of them."""
        names, of_one = unstack(self._names[move], box)
        return [self._kept.get(name) or self._keep(name, self._is_cast[move]) for name in names], of_one

    def _keep(self, name: str, is_cast: bool) -> _KeptTensor:
        """The piece of a tensor, made ready."""
        piece = self._pieces[name]
        run = piece.tensor.detach()
        if needs_copy(run) or name in self._sharing:
            run = torch.empty_like(run, memory_format=torch.contiguous_format).copy_(run)
            self._copies[name] = run
        flat = _as_run(run)
        size = flat.element_size()
        packed = flat if is_cast else flat.view(_OPAQUE[size])
        self._kept[name] = _KeptTensor(flat, packed, size // packed.element_size(), piece.shards)
        return self._kept[name]


@dataclass(frozen=True, slots=True)
class _PlaceInBuffer:
    """A region of one piece, in elements of its buffer."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _find_places(shards: Sequence[Shard], box: Box, width: int, addend: int) -> list[_PlaceInBuffer]:
    """Every place where shards of this addend, or of any, hold the box; elements are ``width`` elements wide."""
    found = []
    at, stop = box.start, box.stop
    for shard in shards:
        # The same as Box.contains, Shard.offset_of and Box.shape without their checks: this runs for every part.
        first, strides = shard.box.start, shard.strides
        assert strides is not None
        if not all(map(operator.le, first, at)) or not all(map(operator.ge, shard.box.stop, stop)):
            continue
        if addend not in (-1, shard.addend):
            continue
        start = shard.offset + sum(map(operator.mul, map(operator.sub, at, first), strides))
        shape = tuple(map(operator.sub, stop, at))
        if width == 1:
            found.append(_PlaceInBuffer(start, shape, strides))
        else:
            wide = (*(stride * width for stride in strides), 1)
            found.append(_PlaceInBuffer(start * width, (*shape, width), wide))
    return found


def _views(flat: torch.Tensor, places: Sequence[_PlaceInBuffer]) -> tuple[torch.Tensor, ...]:
    first = flat.storage_offset()
    return tuple([flat.as_strided(place.shape, place.strides, first + place.start) for place in places])


def needs_copy(tensor: torch.Tensor) -> bool:
    """Whether a tensor is worked on as a contiguous copy."""
    return not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()


def _as_run(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dim of stride 1, which ``view(-1)`` does not promise for a single element."""
    return tensor.as_strided((tensor.numel(),), (1,))
