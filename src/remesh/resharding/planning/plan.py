"""Plan of a move: every message and every local copy, complete before the first byte moves.

A plan is a value. Its rows stand for all messages: sender, receiver, boxes of tensors, and round of each.
It knows what the network must carry at the least, and it cannot exist without having passed the check of all its
invariants (`check`). Its JSON form
is complete: a plan that was read back equals the one that was written, and both have the same digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from remesh.layout import Box
from remesh.resharding.model.bound import Bound
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy, Program
from remesh.resharding.model.tasks import TensorMove, compute_missing_boxes, number_layouts
from remesh.resharding.planning.check import check_plan, check_rank
from remesh.resharding.planning.plan_json import fields_from_json, fields_to_json
from remesh.resharding.schedule.chunks import ChunkTable
from remesh.resharding.schedule.grid_rows import GridRows
from remesh.resharding.schedule.message_rows import MessageRows, PlannedMessages
from remesh.resharding.schedule.rows import Rows, columns_of


@dataclass(frozen=True)
class Plan:
    """All that happens between two layouts of a state; frozen, checked, the same on every rank.

    Made by `remesh.resharding.plan_reshard` or read by `Plan.from_json`; making one checks all that stands below and
    raises `PlanError` for what does not hold.
    """

    moves: tuple[TensorMove, ...]
    """What is moved, by name. Invariant: names ascending and distinct."""
    rows: MessageRows
    """Rows that stand for all messages, by which every wanted box arrives exactly once at every taker that lacks it:
    `Rows`, or `GridRows`, which follow from what is moved."""
    copies: tuple[Copy, ...]
    """By tensor. Invariant: every wanted box that its taker holds, exactly once."""
    bound: Bound
    """What no schedule can beat, and why."""
    network: Network | None = None
    """Links that it was planned for; None when all hosts counted as equal. Invariant: has all hosts of ``host_of``."""
    is_complete: bool = field(init=False, repr=False, compare=False)
    """Whether every rank gets all that it wants."""

    def __post_init__(self) -> None:
        if self.network is not None:
            self.network.check_hosts(self.host_of.values(), "checking a reshard plan")
        object.__setattr__(self, "is_complete", check_plan(self.moves, self.rows, self.copies))

    @property
    def host_of(self) -> Mapping[int, str]:
        """Host of every rank that gives or takes, ascending."""
        return self.rows.host_of

    @property
    def chunks(self) -> ChunkTable:
        """What messages carry."""
        return self.rows.chunks

    @cached_property
    def messages(self) -> PlannedMessages:
        """All messages by round, then giver; made when they are gone through."""
        return PlannedMessages(self.rows)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that no schedule can keep off the busiest NIC."""
        return self.bound.bytes

    @property
    def lower_bound_s(self) -> float | None:
        """Seconds that no schedule beats on the plan's network, latency left out; None without a network."""
        return self.bound.seconds

    @cached_property
    def nic_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes between hosts, by (host, ``"out"`` or ``"in"``), over all NICs of the host."""
        return self.rows.host_loads()

    @property
    def busiest_nic_bytes(self) -> int:
        """Bytes through the busiest host's NICs in its busier direction."""
        return max(self.nic_bytes.values(), default=0)

    @cached_property
    def busiest_link_s(self) -> float | None:
        """Seconds that the busiest link, NICs of a host or uplink of a rack, is busy; None without a network."""
        if self.network is None:
            return None
        links = self.network.hosts
        busy = [nbytes / links[host].total_rate_bytes_per_s for (host, _), nbytes in self.nic_bytes.items()]
        uplinks = self.rows.uplink_loads(self.network) if self.network.racks else {}
        busy += [nbytes / self.network.racks[rack] for (rack, _), nbytes in uplinks.items()]
        return max(busy, default=0.0)

    @property
    def certified_ratio(self) -> float:
        """Busiest link over lower bound: 1.0 is provably the best traffic; 1.0 also when nothing must cross.

        In seconds with a network, in bytes without.
        """
        busiest, least = (
            (self.busiest_nic_bytes, self.bound.bytes)
            if self.busiest_link_s is None or self.bound.seconds is None
            else (self.busiest_link_s, self.bound.seconds)
        )
        return busiest / least if least else 1.0

    @property
    def num_rounds(self) -> int:
        return self.rows.num_rounds

    @cached_property
    def bytes_by_pair(self) -> Mapping[tuple[int, int], int]:
        """Bytes sent, by (giver, taker), in ascending order of pairs."""
        return self.rows.bytes_by_pair()

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Ranks that give, take or copy anything; who only might give is not among them."""
        busy = {rank for pair in self.bytes_by_pair for rank in pair}
        return frozenset(busy.union(*(copy.ranks for copy in self.copies)))

    @property
    def bytes_copied(self) -> int:
        """Bytes copied inside the memory of a rank, over all ranks."""
        itemsizes = [move.src.itemsize_bytes for move in self.moves]
        return sum(copy.box.size * itemsizes[copy.tensor] * len(copy.ranks) for copy in self.copies)

    def program_of(self, rank: int) -> Program:
        """The steps of this rank; empty for a rank that the plan does not need."""
        copies = tuple(copy for copy in self.copies if rank in copy.ranks)
        if isinstance(self.rows, GridRows):
            check_rank(self.rows, copies, rank)
        gives, takes = self.rows.of_rank(rank)
        return Program(copies, tuple(gives.messages()), tuple(takes.messages()))

    @cached_property
    def missing(self) -> Mapping[str, tuple[Box, ...]]:
        """Boxes that are wanted but held by no rank, by tensor; the plan leaves them alone."""
        return {} if self.is_complete else compute_missing_boxes(self.moves)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` makes an equal plan of them."""
        return fields_to_json(self.moves, self.rows, self.copies, self.bound, self.network)

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """The plan that these JSON values describe; raises `PlanError` or `LayoutError` for what is no plan."""
        return cls(**fields_from_json(value))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the whole JSON form; equal exactly when plans are."""
        rows = self.rows
        header = {
            "moves": [move.name for move in self.moves],
            "layouts": _layout_facts(self.moves),
            "hosts": list(self.host_of.items()),
            "copies": [(copy.tensor, copy.box.start, copy.box.stop, copy.ranks) for copy in self.copies],
            "bound": [self.bound.bytes, self.bound.reason, self.bound.seconds],
            "network": None if self.network is None else self.network.to_json(),
            "rows": [rows.ends.value, rows.period] if isinstance(rows, Rows) else None,
        }
        digest = hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
        if isinstance(rows, Rows):
            sizes = np.array([len(ranks) for ranks in rows.rank_sets], dtype=np.int64)
            ranks = np.array([rank for each in rows.rank_sets for rank in each], dtype=np.int64)
            for column in (sizes, ranks, *rows.chunks.columns(), *columns_of(rows)):
                digest.update(f"{column.shape}".encode())
                digest.update(column.astype("<i8").tobytes())
        return digest.hexdigest()


def _layout_facts(moves: Sequence[TensorMove]) -> list[Any]:
    """All that distinguishes layouts, each once, then the numbers of the two of each move."""
    layouts, pairs = number_layouts(moves)
    facts = [
        [
            x.global_shape,
            x.dtype,
            x.partial,
            *((s.holder, s.box.start, s.box.stop, s.offset, s.strides, s.addend) for s in x.shards),
        ]
        for x in layouts
    ]
    return [facts, pairs]
