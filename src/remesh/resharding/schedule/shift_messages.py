"""The messages and chunks of shifts, made by their rule when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from remesh.resharding.model.program import Message
from remesh.resharding.schedule.compact import Columns, CompactMessages
from remesh.resharding.schedule.parts import CompactChunks
from remesh.resharding.schedule.shifts import Shifts
from remesh.resharding.schedule.stream import Chunk


class ShiftMessages(CompactMessages):
    """The messages of shifts, by round, then giver."""

    def __init__(self, shifts: Shifts) -> None:
        self.shifts = shifts
        """The rule."""

    def __len__(self) -> int:
        return self.shifts.num_messages

    @cached_property
    def columns(self) -> Columns:
        return Columns.joined(columns for columns, _ in self.shifts.blocks()).sorted()

    @property
    def num_rounds(self) -> int:
        return self.shifts.num_rounds

    def of_rank(self, rank: int) -> tuple[list[Message], list[Message]]:
        gives, takes = self.shifts.of_rank(rank)
        return gives.messages(), takes.messages()

    def chunk_bytes_of(self, rank: int) -> Mapping[int, int]:
        return {
            number: nbytes
            for table in self.shifts.tables_of(rank)
            if table is not None
            for number, nbytes in zip(table.numbers.tolist(), table.chunks.nbytes.tolist(), strict=True)
        }

    def host_loads(self) -> dict[tuple[str, str], int]:
        sides = zip(("out", "in"), self.shifts.loads, strict=True)
        return dict(sorted(((host, way), nbytes) for way, load in sides for host, nbytes in load.items() if nbytes))

    def bytes_between_hosts(self) -> dict[tuple[str, str], int]:
        host_of, total = self.shifts.host_of, dict[tuple[str, str], int]()
        for (giver, taker), nbytes in self.bytes_by_pair().items():
            if (pair := (host_of[giver], host_of[taker]))[0] != pair[1]:
                total[pair] = total.get(pair, 0) + nbytes
        return total

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        base = max(self.shifts.host_of, default=0) + 1
        total: dict[int, int] = {}
        for block, sizes in self.shifts.blocks():
            keys, place = np.unique(block.giver * base + block.taker, return_inverse=True)
            sums = np.zeros(len(keys), dtype=np.int64)
            np.add.at(sums, place, sizes)
            for key, size in zip(keys.tolist(), sums.tolist(), strict=True):
                total[key] = total.get(key, 0) + size
        return {divmod(key, base): size for key, size in sorted(total.items())}

    def bytes_taken(self) -> dict[int, int]:
        return self.shifts.bytes_taken

    def __eq__(self, other: object) -> bool:
        return self.shifts == other.shifts if isinstance(other, ShiftMessages) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class ShiftChunks(CompactChunks):
    """What the messages of shifts carry, by number; a number whose sets share nothing has a chunk of nothing."""

    def __init__(self, shifts: Shifts) -> None:
        self.shifts = shifts
        """The rule."""

    @property
    def largest_bytes(self) -> int:
        return self.shifts.largest_bytes

    def __len__(self) -> int:
        return self.shifts.num_chunks

    def chunk(self, number: int) -> Chunk:
        table = self.shifts.table_with(number)
        row = table.row_of(number)
        return Chunk((), 0) if row is None else table.chunks[row]

    def __eq__(self, other: object) -> bool:
        return self.shifts == other.shifts if isinstance(other, ShiftChunks) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
