"""Reads of the store by an agent: only the keys that its phase needs.

So the number of reads grows no faster than the number of agents.

An agent that runs reads a handful of keys. One that is at a meeting reads its leader; only the leader reads the
registered nodes and all reports. When all workers of the generation's first node have ended well, that node's agent
looks whether the others' have. The members of a new generation are read by all at once: the store may be lost later.

The store is a parameter: agents give the real one, tests and the simulation of large jobs a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from remesh.elasticity.membership.instructions import StoreView
from remesh.elasticity.membership.phases import Phase
from remesh.elasticity.model.failover import FIRST_OPENING, Opening
from remesh.elasticity.model.generation import Generation, NodeInfo, WorkerReport


class Keys(Protocol):
    """The keys to read from a store."""

    def get(self, key: str, /) -> Mapping[str, Any] | None:
        """The value of a key, None when it is not set."""
        ...

    def get_all(self, keys: Sequence[str], /) -> Sequence[Mapping[str, Any] | None]:
        """The values of keys that are set, in one request; None for those that no agent of this job has set."""
        ...

    def count(self, key: str, /) -> int:
        """The value of a counter."""
        ...


@dataclass(frozen=True, slots=True)
class Wants:
    """The facts that an agent's state machine needs now."""

    index: int
    """The agent's own."""
    phase: Phase
    turn: int
    """The term of leading the meeting: 0 until a leader is lost."""
    is_done: bool
    """Whether the agent answers for the end of a generation whose workers are all done here."""


@dataclass
class StoreReader:
    """Reads views; keeps what cannot change, so that it is read once."""

    decode: Callable[[Mapping[str, Any]], Generation] = Generation.from_json
    """Makes a generation of its JSON form."""
    opening: Opening = FIRST_OPENING
    """The opening that the store holds."""
    plan: Generation | None = None
    """The newest generation that was seen."""
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    """Those that were read so far: all of them for a leader."""
    _members_of: Generation | None = None
    """The plan all of whose nodes were read last."""
    _num_counted: int = 0
    """Nodes that had taken a number of this store when last looked."""
    _unwritten: set[int] = field(default_factory=set)
    """Those of them that had not written their address and name: they will in a moment, or never."""
    _done: set[int] = field(default_factory=set)
    """Nodes that are done with the newest generation."""

    def read(self, keys: Keys, wants: Wants) -> StoreView:
        """Read the current content of the store."""
        number = max(self.plan.number if self.plan else 0, self.opening.latest - 1)
        newest = None
        while (plan := keys.get(f"gen/{number + 1}/plan")) is not None:
            number += 1
            newest = self.decode(plan)
        if newest is not None:
            self._read_members(keys, newest)  # first: without them no node finds the way to the next store
            self.plan = newest
            self._done.clear()
        elif self.plan is not None:
            self._read_members(keys, self.plan)
        lead = keys.get(f"gen/{number + 1}/lead/{wants.turn}") if wants.phase is Phase.MEETING else None
        leader = None if lead is None else int(lead["node"])
        if leader == wants.index:
            self.read_nodes(keys)
        if wants.is_done and self.plan is not None:
            waited_for = self.plan.nodes - self._done
            self._done |= {index for index in waited_for if keys.get(f"gen/{number}/done/{index}") is not None}
        return StoreView(
            latest=number,
            plan=self.plan,
            nodes=self.nodes,
            here=self._read_reports(keys, number + 1, wants, leader) if wants.phase is Phase.MEETING else {},
            pause=_text(keys.get(f"gen/{number}/pause")),
            broken=_text(keys.get(f"gen/{number}/broken")),
            done=frozenset(self._done),
            end=keys.get("end"),
            place=self.opening.place,
            leader=leader,
        )

    def move(self, keys: Keys, opening: Opening) -> None:
        """Read another store from now on. What the old one had of the newest generation may not hold there."""
        self.opening = opening
        self._num_counted, self._unwritten = 0, set(opening.nodes) - self.nodes.keys()
        self._done.clear()
        if self.plan is not None and (plan := keys.get(f"gen/{self.plan.number}/plan")) is not None:
            self.plan = self.decode(plan)

    def node(self, keys: Keys, index: int) -> NodeInfo | None:
        """The identity that a node has written to the store; None if it has not."""
        if index not in self.nodes and (info := keys.get(f"nodes/{index}")) is not None:
            self.nodes[index] = NodeInfo(**info)
        return self.nodes.get(index)

    def read_nodes(self, keys: Keys) -> Mapping[int, NodeInfo]:
        """All that have registered."""
        num_counted = keys.count("nodes/count")
        first = self.opening.first_index
        self._unwritten |= set(range(first + self._num_counted, first + num_counted))
        self._num_counted = num_counted
        self._unwritten = {index for index in sorted(self._unwritten) if self.node(keys, index) is None}
        return self.nodes

    def _read_members(self, keys: Keys, plan: Generation) -> None:
        """All nodes of a plan, once: a node that is left behind must know where the others are."""
        if plan is self._members_of:
            return
        indices = sorted(plan.nodes - self.nodes.keys())
        infos = keys.get_all([f"nodes/{index}" for index in indices])
        self.nodes |= {index: NodeInfo(**info) for index, info in zip(indices, infos, strict=True) if info is not None}
        if None not in infos:
            self._members_of = plan

    def _read_reports(
        self, keys: Keys, meeting: int, wants: Wants, leader: int | None
    ) -> dict[int, tuple[WorkerReport, ...]]:
        wanted = self.nodes if leader == wants.index else {wants.index, *([] if leader is None else [leader])}
        found = {}
        for index in wanted:
            if (value := keys.get(f"gen/{meeting}/here/{index}")) is not None:
                found[index] = tuple(WorkerReport(**report) for report in value["workers"])
        return found


def _text(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else str(value["text"])
