"""Messages of a plan: the face of the rows that stand for them, and the messages themselves as columns and objects.

A plan keeps rows (`remesh.resharding.schedule.rows`), each of which stands for many messages, or works out the rows of
one rank at a time (`remesh.resharding.schedule.grid_rows`). Both answer the same questions. A rank asks for its own
messages; going through all of them makes all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Message
from remesh.resharding.model.slices import IntArray, distinct
from remesh.resharding.schedule.chunks import ChunkTable


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Messages as columns."""

    round: IntArray
    giver: IntArray
    taker: IntArray
    chunk: IntArray

    @classmethod
    def joined(cls, several: Iterable[Columns]) -> Columns:
        """The messages of all, one after the other."""
        none = np.empty(0, dtype=np.int64)
        rows = [(none,) * 4, *((each.round, each.giver, each.taker, each.chunk) for each in several)]
        return cls(*map(np.concatenate, zip(*rows, strict=True)))

    def take(self, rows: IntArray) -> Columns:
        """These rows, in this order."""
        return Columns(self.round[rows], self.giver[rows], self.taker[rows], self.chunk[rows])

    def sorted(self) -> Columns:
        """The messages sorted by round, then giver."""
        return self.take(np.lexsort((self.giver, self.round)))

    def messages(self) -> list[Message]:
        """As objects."""
        rows = zip(self.round.tolist(), self.giver.tolist(), self.taker.tolist(), self.chunk.tolist(), strict=True)
        return [Message(*row) for row in rows]


class MessageRows(ABC):
    """Rows that stand for all messages of a plan. The number of messages is known without making any."""

    host_of: Mapping[int, str]
    """Host of every rank, ascending."""
    chunks: ChunkTable
    """What messages carry."""

    @property
    @abstractmethod
    def num_messages(self) -> int:
        """Known without making any."""

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """No message is in this round or a later one."""

    @abstractmethod
    def of_rank(self, rank: int) -> tuple[Columns, Columns]:
        """What one rank gives, and what it takes, by round."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[Columns, IntArray]]:
        """All messages and the bytes of each, some at a time, in no order that means anything."""

    @abstractmethod
    def chunk_bytes_of(self, rank: int) -> Sequence[int] | Mapping[int, int]:
        """Bytes of each chunk that the rank gives or takes, by number."""

    @abstractmethod
    def host_loads(self) -> dict[tuple[str, str], int]:
        """Bytes between hosts, by (host, ``"out"`` or ``"in"``), ascending; found without going through messages."""

    @abstractmethod
    def bytes_between_hosts(self) -> dict[tuple[str, str], int]:
        """Bytes by (giver, taker), without what stays inside a host."""

    def uplink_loads(self, network: Network) -> dict[tuple[str, str], int]:
        """Bytes over the uplinks of racks, by (rack, ``"out"`` or ``"in"``)."""
        rack_of = {host: network.rack_of(host) for host in self.host_of.values()}
        total: dict[tuple[str, str], int] = {}
        for pair, nbytes in self.bytes_between_hosts().items():
            racks = [rack_of[host] for host in pair]
            for rack, way in zip(racks, ("out", "in"), strict=True):
                if rack is not None and racks[0] != racks[1]:
                    total[rack, way] = total.get((rack, way), 0) + nbytes
        return total

    @abstractmethod
    def bytes_taken(self) -> dict[int, int]:
        """Bytes that each rank takes, of those that take any; found without going through messages."""

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes by (giver, taker) among ranks, in ascending order of pairs; goes through all messages."""
        base = max(self.host_of, default=0) + 1
        total: dict[int, int] = {}
        for block, sizes in self.blocks():
            keys, place = distinct(block.giver * base + block.taker, base * base)
            sums = np.zeros(len(keys), dtype=np.int64)
            np.add.at(sums, place, sizes)
            for key, size in zip(keys.tolist(), sums.tolist(), strict=True):
                total[key] = total.get(key, 0) + size
        return {divmod(key, base): size for key, size in sorted(total.items())}


class PlannedMessages(Sequence[Message]):
    """All messages by round, then giver, made when they are asked for."""

    def __init__(self, rows: MessageRows) -> None:
        self._rows = rows

    @cached_property
    def columns(self) -> Columns:
        """All of them."""
        return Columns.joined(columns for columns, _ in self._rows.blocks()).sorted()

    def __len__(self) -> int:
        return self._rows.num_messages

    def __iter__(self) -> Iterator[Message]:
        return iter(self.columns.messages())

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        if isinstance(index, slice):
            return tuple(self.columns.take(np.arange(len(self))[index]).messages())
        return self.columns.take(np.array([range(len(self))[index]])).messages()[0]


def loads_of(between_hosts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """What each host sends and takes, by (host, ``"out"`` or ``"in"``), in ascending order."""
    load: dict[tuple[str, str], int] = {}
    for (giver, taker), nbytes in between_hosts.items():
        for end in ((giver, "out"), (taker, "in")):
            load[end] = load.get(end, 0) + nbytes
    return dict(sorted(load.items()))
