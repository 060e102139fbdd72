"""Many parts and many chunks, as columns. What a plan with a million messages keeps instead of objects.

Boxes of tensors with fewer dims than the widest are padded behind with ``[0, 1)``, which changes neither their size nor
what contains what.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from remesh.layout import Box
from remesh.resharding.model.slices import IntArray
from remesh.resharding.schedule.stream import Chunk, Part


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


class CompactChunks(Sequence[Chunk]):
    """Chunks that are kept as something smaller, each made when it is asked for."""

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


class Chunks(CompactChunks):
    """What messages carry, one chunk in each row; makes a `Chunk` of a row when it is asked for."""

    def __init__(self, parts: PartRows, first_part: IntArray) -> None:
        self.parts = parts
        """Parts of all chunks, in the order of the chunks."""
        self.first_part = first_part
        """Where the parts of each chunk begin, and the number of all parts, ``[num_chunks + 1]``."""
        total = np.concatenate(([0], np.cumsum(parts.nbytes)))
        self.nbytes: IntArray = total[first_part[1:]] - total[first_part[:-1]]
        """Bytes of each chunk."""

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
        """All that tells one table from another of the same tensors; sizes in bytes follow from it."""
        return self.first_part, self.parts.tensor, self.parts.starts, self.parts.stops


def sizes_of(chunks: Sequence[Chunk]) -> Sequence[int]:
    """Bytes of each chunk."""
    return chunks.nbytes.tolist() if isinstance(chunks, Chunks) else [chunk.nbytes for chunk in chunks]


def largest_of(chunks: Sequence[Chunk]) -> int:
    """Bytes of the largest chunk; 0 without any."""
    if isinstance(chunks, CompactChunks):
        return chunks.largest_bytes
    return max((chunk.nbytes for chunk in chunks), default=0)


def ends_of(counts: Iterable[int] | IntArray) -> IntArray:
    """The starts of consecutive runs of these lengths, and the end of the last one."""
    array = np.asarray(counts if isinstance(counts, np.ndarray) else list(counts), dtype=np.int64)
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(array)))
