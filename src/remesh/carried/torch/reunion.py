"""Rendezvous of ranks after a cut, to make their groups again, by counters in the job's store.

    live/KEY    how many members still have the group    |  each rank adds one for each of its groups,
    arrived     how many ranks have reported all they have   |  then one here; the last reports that all have
    RANK        what that rank has received, by group and sender, for the ranks that have sent something to it

A rank asks for as many values as it has groups, and for those of ranks that it had open messages to: if each rank read
the values of all others, the cost would be quadratic. No rank waits for one that has ended, or for one that has made no
group yet: in that case no rank has a group, as all ranks are in the first one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.distributed import PrefixStore, Store

from remesh.carried.torch.groups import GroupPlace

_ARRIVED, _ALL = "arrived", "all"

Received = Sequence[Sequence[int]]
"""[peer, tag, messages that have ended] of the streams to a rank."""


class Reunion:
    """One rank's part in the meeting after a cut."""

    def __init__(self, store: Store, rank: int) -> None:
        """``store`` holds no values of another cut."""
        self._store, self._rank = store, rank

    def arrive(self, received: dict[str, Received], num_ranks: int) -> None:
        """Publish what this rank has received, by group key, and wait until ``num_ranks`` in all have done so."""
        self._store.set(str(self._rank), json.dumps(received))
        for key in received:
            self._store.add(f"live/{key}", 1)
        if self._store.add(_ARRIVED, 1) == num_ranks:
            self._store.set(_ALL, "")
        if received:
            self._store.wait([_ALL])

    def find_whole(self, places: Sequence[GroupPlace]) -> list[bool]:
        """Whether all members still have each of these groups, which this rank has."""
        counts = self._store.multi_get([f"live/{place.key}" for place in places])
        return [int(count) == len(place.members) for place, count in zip(places, counts, strict=True)]

    def find_gone(self, place: GroupPlace, ended: Sequence[int]) -> list[int]:
        """World ranks of the members that no longer have a group."""
        return [rank for rank in place.members if rank in ended or place.key not in self._received(rank)]

    def received_by(self, place: GroupPlace, peer: int) -> Received:
        """What a member of a whole group, by its rank there, has received in it."""
        return self._received(place.members[peer])[place.key]

    def store_of(self, place: GroupPlace) -> Store:
        """The store over which the group is made again."""
        return PrefixStore(f"{place.key}/", self._store)

    def _received(self, rank: int) -> dict[str, Received]:
        told: dict[str, Received] = json.loads(self._store.get(str(rank)))
        return told
