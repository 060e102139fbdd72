"""In which portions? Streams of fused slices, cut into chunks.

Definitions. A *part* is a box of one tensor. A *stream* is the concatenation of all parts, of all tensors, that the
same ranks give to the same ranks: row-major bytes of each part, one part after the other. A *chunk* is a run of a
stream that travels as one message per hop; many small tensors share a chunk, a large one is cut into many.

Algorithm. Read the streams of a host group in order and cut where a route ends, where a stream ends, and where a
chunk is full. A cut inside a part is moved down to a whole number of its trailing rows when that costs little
(the *slack*), so that the two sides of the cut are single boxes; else it is exact to the element, and a side is at
most ``2 * ndim - 1`` boxes (`remesh.layout.boxes_of_flat_range`).

Parts come sorted by falling item size, so that every part begins aligned in its message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from remesh.layout import Box, boxes_of_flat_range
from remesh.resharding.model.bound import HostGroup
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


Groups = Mapping[HostGroup, Sequence[SliceStream]]
"""All streams of a plan, by the hosts that own and receive them; both in ascending order."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message carries."""

    parts: tuple[Part, ...]
    """In wire order. Invariant: at least one; item sizes never rise."""
    nbytes: int
    """Sum over the parts."""


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
