"""Ranks that meet after a cut find out which of their groups are whole, whoever has left one, and at what cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from hypothesis import given, strategies as st

from remesh.carried.torch.groups import GroupPlace
from remesh.carried.torch.reunion import Reunion

_PATIENCE_S = 100.0


class _CountingStore:
    """A store of torch, and how many values were read of it."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.num_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.num_read += len(keys)
        return [self._store.get(key) for key in keys]


def _meet(store: Any, living: Sequence[int], held: dict[int, list[GroupPlace]]) -> dict[int, list[bool]]:
    """What each living rank finds; all at the same time."""
    found: dict[int, list[bool]] = {}

    def be(rank: int) -> None:
        reunion = Reunion(store, rank)
        reunion.arrive({place.key: [[0, 0, rank]] for place in held[rank]}, len(living))
        found[rank] = reunion.find_whole(held[rank])

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in living]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    return found


_RANKS = range(4)
_MEMBERS = st.lists(st.sets(st.sampled_from(_RANKS), min_size=1), max_size=3)


@given(
    members=_MEMBERS, left=st.sets(st.tuples(st.sampled_from(_RANKS), st.integers(0, 2))),
    ended=st.sets(st.sampled_from(_RANKS)),
)  # fmt: skip
def test_a_group_is_whole_when_none_of_its_members_has_left_it(
    members: list[set[int]], left: set[tuple[int, int]], ended: set[int]
) -> None:
    living = [rank for rank in _RANKS if rank not in ended]
    places = [GroupPlace(f"group {number}", tuple(sorted(ranks)), 0) for number, ranks in enumerate(members)]
    held = {
        rank: [place for number, place in enumerate(places) if rank in members[number] and (rank, number) not in left]
        for rank in living
    }
    store = dist.HashStore()
    found = _meet(store, living, held)
    for rank in living:
        for place, is_whole in zip(held[rank], found[rank], strict=True):
            gone = [each for each in place.members if each in ended or place not in held[each]]
            assert is_whole == (not gone)
            assert Reunion(store, rank).find_gone(place, sorted(ended)) == gone


def test_a_rank_finds_what_its_peer_has_received() -> None:
    store, place = dist.HashStore(), GroupPlace("pair", (3, 5), 0)
    Reunion(store, 3).arrive({}, 2)
    Reunion(store, 5).arrive({"pair": [[0, 7, 2]]}, 2)
    assert Reunion(store, 3).received_by(place, 1) == [[0, 7, 2]]


def test_what_ranks_read_grows_like_their_number() -> None:
    read = Counter[int]()
    for num_ranks in (8, 32):
        store, world = _CountingStore(), GroupPlace("world", tuple(range(num_ranks)), 0)
        _meet(store, range(num_ranks), {rank: [world] for rank in range(num_ranks)})
        read[num_ranks] = store.num_read
    assert read[32] == 4 * read[8]
