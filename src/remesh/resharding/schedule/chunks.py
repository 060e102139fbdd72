"""Chunks: what messages carry, as objects and as columns, and the cutting of streams into them.

Definitions. A *part* is a box of one tensor. A *stream* is the concatenation of all parts, of all tensors, that the
same ranks give to the same ranks: row-major bytes of each part, one part after the other. A *chunk* is a run of a
stream that travels as one message per hop; many small tensors share a chunk, a large one is cut into many.

Algorithm. Read the streams of a host group in order and cut where a route ends, where a stream ends, and where a
chunk is full. A cut inside a part is moved down to a whole number of its trailing rows when that costs little
(the *slack*), so that the two sides of the cut are single boxes; else it is exact to the element, and a side is at
most ``2 * ndim - 1`` boxes (`remesh.layout.boxes_of_flat_range`).

Parts come sorted by falling item size, so that every part begins aligned in its message. In columns, boxes of tensors
with fewer dims than the widest are padded behind with ``[0, 1)``, which changes neither their size nor what contains
what.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from remesh.layout import Box, boxes_of_flat_range
from remesh.resharding.model.slices import IntArray
from remesh.resharding.schedule.senders import Route

_CHUNK_SLACK = 8
"""A chunk may stay this fraction below its size for the sake of a simple cut."""
_ROUTE_SLACK = 512
"""A route may lose this fraction of the group's bytes to the next one for the sake of a simple cut."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of one tensor, as it lies in a message: row-major."""

    tensor: int
    """Position of the tensor among the plan's moves."""
    box: Box
    """In global indices. Invariant: not empty."""
    nbytes: int
    """Size in bytes."""


@dataclass(slots=True)
class SliceStream:
    """All parts that the same ranks give to the same ranks."""

    givers: tuple[int, ...]
    """Ranks that hold all of it, ascending."""
    takers: tuple[int, ...]
    """Ranks that want all of it and do not hold it, ascending. Invariant: at least one."""
    parts: list[Part]
    """Invariant: item sizes never rise."""
    nbytes: int
    """Sum over the parts."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message carries."""

    parts: tuple[Part, ...]
    """In wire order. Invariant: at least one; item sizes never rise."""
    nbytes: int
    """Sum over the parts."""


@dataclass(frozen=True, slots=True, eq=False)
class PartRows:
    """Parts of messages, one in each row."""

    tensor: IntArray
    """Position of the tensor among the moves."""
    starts: IntArray
    """First global index, padded, ``[num_parts, ndim]``."""
    stops: IntArray
    """One past the last, padded."""
    nbytes: IntArray
    """Size in bytes."""
    ndims: tuple[int, ...]
    """Dims of each tensor."""

    @classmethod
    def of(cls, parts: Sequence[Part], ndims: tuple[int, ...]) -> PartRows:
        """The same parts as columns."""
        width = max(ndims, default=0)
        pads = [((0,) * (width - ndim), (1,) * (width - ndim)) for ndim in ndims]
        return cls(
            np.array([part.tensor for part in parts], dtype=np.int64),
            np.array([part.box.start + pads[part.tensor][0] for part in parts], np.int64).reshape(len(parts), width),
            np.array([part.box.stop + pads[part.tensor][1] for part in parts], np.int64).reshape(len(parts), width),
            np.array([part.nbytes for part in parts], dtype=np.int64),
            ndims,
        )

    @classmethod
    def joined(cls, several: Sequence[PartRows]) -> PartRows:
        """The rows of several tables over the same tensors, one after the other."""
        if len(several) == 1:
            return several[0]
        columns = [
            np.concatenate(column)
            for column in zip(*((each.tensor, each.starts, each.stops, each.nbytes) for each in several), strict=True)
        ]
        return cls(columns[0], columns[1], columns[2], columns[3], several[0].ndims)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: IntArray) -> PartRows:
        """These rows, in this order."""
        return PartRows(
            self.tensor.take(rows),
            self.starts.take(rows, axis=0),
            self.stops.take(rows, axis=0),
            self.nbytes.take(rows),
            self.ndims,
        )

    def rows(self, first: int, stop: int) -> list[Part]:
        """Rows as objects."""
        columns = (self.tensor, self.starts, self.stops, self.nbytes)
        made = []
        for tensor, start, end, nbytes in zip(*(each[first:stop].tolist() for each in columns), strict=True):
            ndim = self.ndims[tensor]
            made.append(Part(tensor, Box(tuple(start[:ndim]), tuple(end[:ndim])), nbytes))
        return made


class ChunkTable(Sequence[Chunk]):
    """Chunks by number, made when they are asked for."""

    @property
    @abstractmethod
    def largest_bytes(self) -> int:
        """No chunk has more bytes."""

    @abstractmethod
    def chunk(self, number: int) -> Chunk:
        """The chunk of this number, which is not negative."""

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        found = range(len(self))[index]
        return self.chunk(found) if isinstance(found, int) else tuple(map(self.chunk, found))


class Chunks(ChunkTable):
    """Chunks as columns, one in each row."""

    def __init__(self, parts: PartRows, first_part: IntArray) -> None:
        self.parts = parts
        """Parts of all chunks, in the order of the chunks."""
        self.first_part = first_part
        """Where the parts of each chunk begin, and the number of all parts, ``[num_chunks + 1]``."""
        total = np.concatenate(([0], np.cumsum(parts.nbytes)))
        self.nbytes: IntArray = total[first_part[1:]] - total[first_part[:-1]]
        """Bytes of each chunk."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], ndims: tuple[int, ...]) -> Chunks:
        """The same chunks as columns; ``ndims`` are the dims of each tensor."""
        parts = [part for chunk in chunks for part in chunk.parts]
        return cls(PartRows.of(parts, ndims), ends_of([len(chunk.parts) for chunk in chunks]))

    @property
    def largest_bytes(self) -> int:
        return int(self.nbytes.max(initial=0))

    def __len__(self) -> int:
        return len(self.nbytes)

    def chunk(self, number: int) -> Chunk:
        parts = self.parts.rows(int(self.first_part[number]), int(self.first_part[number + 1]))
        return Chunk(tuple(parts), int(self.nbytes[number]))

    def __iter__(self) -> Iterator[Chunk]:
        parts = self.parts.rows(0, len(self.parts))
        ends = self.first_part.tolist()
        for first, stop, nbytes in zip(ends, ends[1:], self.nbytes.tolist(), strict=False):
            yield Chunk(tuple(parts[first:stop]), nbytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chunks):
            return NotImplemented
        return self.parts.ndims == other.parts.ndims and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self.columns(), other.columns(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def columns(self) -> tuple[IntArray, ...]:
        """All that distinguishes one table from another of the same tensors; sizes in bytes follow from it."""
        return self.first_part, self.parts.tensor, self.parts.starts, self.parts.stops


class KeptChunks(dict[int, Chunk]):
    """Chunks of a table, each made when it is first asked for: a rank needs its own ones in every run."""

    def __init__(self, table: ChunkTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, number: int) -> Chunk:
        self[number] = self._table[number]
        return self[number]


def ends_of(counts: Iterable[int] | IntArray) -> IntArray:
    """The starts of consecutive runs of these lengths, and the end of the last one."""
    array = np.asarray(counts if isinstance(counts, np.ndarray) else list(counts), dtype=np.int64)
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(array)))


@dataclass(frozen=True, slots=True)
class Cut:
    """A chunk, the stream it was cut from, and the route it takes."""

    stream: int
    route: int
    chunk: Chunk


def cut_streams(
    streams: Sequence[Sequence[Part]], routes: Sequence[Route], chunk_bytes: Sequence[int]
) -> Iterator[Cut]:
    """Cut the concatenated streams into chunks; ``chunk_bytes[i]`` is the largest size on ``routes[i]``."""
    route_slack = routes[-1].stop // _ROUTE_SLACK
    at = 0
    route = 0
    for number, parts in enumerate(streams):
        reader = _Reader(parts)
        while reader.left:
            last = route == len(routes) - 1
            wanted = reader.left if last else min(reader.left, routes[route].stop - at)
            # A remainder too small to be worth a message goes with the next route.
            if not last and wanted <= route_slack and wanted < reader.left:
                route += 1
                continue
            num_chunks = -(-wanted // chunk_bytes[route])
            slack = route_slack if num_chunks == 1 else chunk_bytes[route] // _CHUNK_SLACK
            full = -(-wanted // num_chunks) + (slack if num_chunks > 1 else 0)
            chunk = reader.take(min(full, wanted, chunk_bytes[route]), slack)
            if chunk is None:
                if last:
                    chunk = reader.take_one()
                else:
                    route += 1
                    continue
            at += chunk.nbytes
            yield Cut(number, route, chunk)
            if not last and at >= routes[route].stop:
                route += 1


class _Reader:
    """The unread rest of a stream."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.rest = list(reversed(parts))
        """Unread parts, next one last."""
        self.left = sum(part.nbytes for part in parts)
        """Bytes of them."""

    def take(self, most: int, slack: int) -> Chunk | None:
        """The next chunk of at most ``most`` bytes; None when not even one element fits."""
        taken: list[Part] = []
        room = most
        while self.rest and self.rest[-1].nbytes <= room:
            taken.append(self.rest.pop())
            room -= taken[-1].nbytes
        if self.rest and (size := _cut_at(self.rest[-1], room, slack if taken else min(slack, room - 1))):
            taken += self._split(size)
        return self._chunk(taken) if taken else None

    def take_one(self) -> Chunk:
        """The next element alone, however small a chunk was asked for."""
        return self._chunk(self._split(1))

    def _split(self, size: int) -> list[Part]:
        """Cut the next part after ``size`` elements; its first half is returned, the second stays."""
        part = self.rest.pop()
        itemsize = part.nbytes // part.box.size
        head, tail = (
            [Part(part.tensor, box, box.size * itemsize) for box in boxes_of_flat_range(part.box, start, stop)]
            for start, stop in ((0, size), (size, part.box.size))
        )
        self.rest += reversed(tail)
        return head

    def _chunk(self, taken: list[Part]) -> Chunk:
        nbytes = sum(part.nbytes for part in taken)
        self.left -= nbytes
        return Chunk(tuple(taken), nbytes)


def _cut_at(part: Part, room: int, slack: int) -> int:
    """The number of elements to cut after, so that they fill ``room`` bytes, or at most ``slack`` fewer."""
    itemsize = part.nbytes // part.box.size
    fits = room // itemsize
    for dim in range(part.box.ndim):
        row = math.prod(part.box.shape[dim:])
        if row * itemsize <= slack:
            return fits - fits % row
    return fits
