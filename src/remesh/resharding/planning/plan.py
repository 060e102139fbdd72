"""What does everyone do? The plan: every message and every local copy, complete before the first byte moves.

A plan is a value. It knows who sends which boxes of which tensors to whom and in which round, what the network must
carry at the least, and it cannot exist without having passed the check of all its invariants (`check`). Its JSON form
is complete: a plan that was read back equals the one that was written, and both have the same digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from remesh.layout import Box
from remesh.resharding.model.bound import Bound
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy, Message, Program
from remesh.resharding.model.tasks import TensorMove, compute_missing_boxes
from remesh.resharding.planning.check import check_plan
from remesh.resharding.planning.check_shifts import check_part
from remesh.resharding.planning.plan_json import PlanFields, digest_of, fields_from_json, fields_to_json
from remesh.resharding.schedule.compact import CompactMessages, loads_of
from remesh.resharding.schedule.shift_messages import ShiftMessages
from remesh.resharding.schedule.stream import Chunk


@dataclass(frozen=True)
class Plan:
    """All that happens between two layouts of a state; frozen, checked, the same on every rank.

    Made by `remesh.resharding.plan_reshard` or read by `Plan.from_json`; making one checks all that stands below and
    raises `PlanError` for what does not hold.
    """

    moves: tuple[TensorMove, ...]
    """What is moved, by name. Invariant: names ascending and distinct."""
    host_of: Mapping[int, str]
    """Host of every rank that gives or takes."""
    chunks: Sequence[Chunk]
    """What messages carry: a tuple, the `Chunks` of flows, or `ShiftChunks`."""
    messages: Sequence[Message]
    """By round, then giver: a tuple, or `CompactMessages` where there are too many to keep. Invariant: every wanted box
    arrives exactly once at every taker that lacks it."""
    copies: tuple[Copy, ...]
    """By tensor. Invariant: every wanted box that its taker holds, exactly once."""
    bound: Bound
    """What no schedule can beat, and why."""
    network: Network | None = None
    """Links that it was planned for; None when all hosts counted as equal. Invariant: has all hosts of ``host_of``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_of", dict(sorted(self.host_of.items())))
        if self.network is not None:
            self.network.check_hosts(self.host_of.values(), "checking a reshard plan")
        check_plan(self.moves, self.host_of, self.chunks, self.messages, self.copies)

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
        if isinstance(self.messages, CompactMessages):
            return self.messages.host_loads()
        return loads_of(self._bytes_between_hosts)

    @cached_property
    def _bytes_between_hosts(self) -> Mapping[tuple[str, str], int]:
        if isinstance(self.messages, CompactMessages):
            return self.messages.bytes_between_hosts()
        load: dict[tuple[str, str], int] = {}
        for (giver, taker), nbytes in self.bytes_by_pair.items():
            pair = (self.host_of[giver], self.host_of[taker])
            if pair[0] != pair[1]:
                load[pair] = load.get(pair, 0) + nbytes
        return load

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
        uplink: dict[tuple[str, str], int] = {}
        for pair, nbytes in self._bytes_between_hosts.items() if self.network.racks else ():
            racks = [self.network.rack_of(host) for host in pair]
            for rack, way in zip(racks, ("out", "in"), strict=True):
                if rack is not None and racks[0] != racks[1]:
                    uplink[rack, way] = uplink.get((rack, way), 0) + nbytes
        busy += [nbytes / self.network.racks[rack] for (rack, _), nbytes in uplink.items()]
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
        if isinstance(self.messages, CompactMessages):
            return self.messages.num_rounds
        return self.messages[-1].round + 1 if self.messages else 0

    @cached_property
    def bytes_by_pair(self) -> Mapping[tuple[int, int], int]:
        """Bytes sent, by (giver, taker), in ascending order of pairs."""
        if isinstance(self.messages, CompactMessages):
            return self.messages.bytes_by_pair()
        total: dict[tuple[int, int], int] = {}
        for message in self.messages:
            pair = (message.giver, message.taker)
            total[pair] = total.get(pair, 0) + self.chunks[message.chunk].nbytes
        return dict(sorted(total.items()))

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Ranks that give, take or copy anything; who only might give is not among them."""
        if isinstance(self.messages, CompactMessages):
            busy = {rank for pair in self.bytes_by_pair for rank in pair}
        else:
            busy = {rank for message in self.messages for rank in (message.giver, message.taker)}
        return frozenset(busy.union(*(copy.ranks for copy in self.copies)))

    @property
    def bytes_copied(self) -> int:
        """Bytes copied inside the memory of a rank, over all ranks."""
        itemsizes = [move.src.itemsize_bytes for move in self.moves]
        return sum(copy.box.size * itemsizes[copy.tensor] * len(copy.ranks) for copy in self.copies)

    def program_of(self, rank: int) -> Program:
        """The steps of this rank; empty for a rank that the plan does not need."""
        copies = tuple(copy for copy in self.copies if rank in copy.ranks)
        if isinstance(self.messages, CompactMessages):
            program = Program(copies, *map(tuple, self.messages.of_rank(rank)))
            if isinstance(self.messages, ShiftMessages):
                check_part(self.messages.shifts, program, rank)
            return program
        return Program(
            copies=copies,
            gives=tuple(message for message in self.messages if message.giver == rank),
            takes=tuple(message for message in self.messages if message.taker == rank),
        )

    @cached_property
    def missing(self) -> Mapping[str, tuple[Box, ...]]:
        """Boxes that are wanted but held by nobody, by tensor; the plan leaves them alone."""
        if isinstance(self.messages, ShiftMessages):
            return {}  # the check has seen that both sides are all of each tensor
        return compute_missing_boxes(self.moves)

    @property
    def _fields(self) -> PlanFields:
        return PlanFields(self.moves, self.host_of, self.chunks, self.messages, self.copies, self.bound, self.network)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` makes an equal plan of them."""
        return fields_to_json(self._fields)

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """The plan that these JSON values describe; raises `PlanError` or `LayoutError` for what is no plan."""
        fields = fields_from_json(value)
        return cls(
            fields.moves, fields.host_of, fields.chunks, fields.messages, fields.copies, fields.bound, fields.network
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that the JSON form says; equal exactly when plans are."""
        return digest_of(self._fields)
