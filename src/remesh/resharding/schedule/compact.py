"""What is asked of messages that are too many to keep? The face of all that stands for them.

Flows (`flow_messages`) keep a row for many messages; shifts (`shift_messages`) keep nothing, they follow a rule. A
plan and a transfer ask both the same questions. A rank asks for its own messages; going through all of them makes all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from remesh.resharding.model.program import Message
from remesh.resharding.model.slices import IntArray


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


class CompactMessages(Sequence[Message]):
    """Messages by round, then giver, made when they are asked for. Their number is known without making any."""

    @property
    @abstractmethod
    def columns(self) -> Columns:
        """All messages, by round, then giver."""

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """No message is in this round or a later one."""

    @abstractmethod
    def of_rank(self, rank: int) -> tuple[list[Message], list[Message]]:
        """What one rank gives, and what it takes, by round."""

    @abstractmethod
    def chunk_bytes_of(self, rank: int) -> Sequence[int] | Mapping[int, int]:
        """Bytes of each chunk that the rank gives or takes, by number."""

    @abstractmethod
    def host_loads(self) -> dict[tuple[str, str], int]:
        """Bytes between hosts, by (host, ``"out"`` or ``"in"``)."""

    @abstractmethod
    def bytes_between_hosts(self) -> dict[tuple[str, str], int]:
        """Bytes by (giver, taker), without what stays inside a host."""

    @abstractmethod
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes by (giver, taker) among ranks, in ascending order of pairs; goes through all messages."""

    @abstractmethod
    def bytes_taken(self) -> dict[int, int]:
        """Bytes that each rank takes; nobody goes through messages for it."""

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
