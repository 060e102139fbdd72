"""The messages of flows, made of their rows when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from remesh.resharding.model.program import Message
from remesh.resharding.schedule import flow_bytes
from remesh.resharding.schedule.compact import Columns, CompactMessages, loads_of
from remesh.resharding.schedule.flows import Flows, columns_of
from remesh.resharding.schedule.parts import sizes_of


class FlowMessages(CompactMessages):
    """The messages of flows, by round, then giver."""

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        """The rows."""

    def __len__(self) -> int:
        return self.flows.num_messages

    @cached_property
    def columns(self) -> Columns:
        """All messages, by round, then giver."""
        return Columns.joined(self.flows.blocks()).sorted()

    @property
    def num_rounds(self) -> int:
        return self.flows.num_rounds

    def of_rank(self, rank: int) -> tuple[list[Message], list[Message]]:
        gives, takes = self.flows.of_rank(rank)
        return gives.messages(), takes.messages()

    def chunk_bytes_of(self, rank: int) -> Sequence[int]:
        return sizes_of(self.flows.chunks)

    def host_loads(self) -> dict[tuple[str, str], int]:
        return loads_of(self.bytes_between_hosts())

    def bytes_between_hosts(self) -> dict[tuple[str, str], int]:
        return flow_bytes.bytes_between_hosts(self.flows)

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        return flow_bytes.bytes_by_pair(self.flows)

    def bytes_taken(self) -> dict[int, int]:
        return flow_bytes.bytes_taken(self.flows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlowMessages):
            return NotImplemented
        mine, theirs = self.flows, other.flows
        return (
            mine.rank_sets == theirs.rank_sets
            and mine.hosts == theirs.hosts
            and mine.chunks == theirs.chunks
            and all(np.array_equal(a, b) for a, b in zip(columns_of(mine), columns_of(theirs), strict=True))
        )

    __hash__ = None  # type: ignore[assignment]
