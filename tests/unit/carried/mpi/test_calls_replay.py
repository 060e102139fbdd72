"""Communicators that are made again after a restart: all members agree on which, and nobody waits for ever."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, strategies as st

from remesh.carried.mpi.lower.replay import Named, choose_common

_NUM_RANKS = 5
_Groups = list[tuple[int, set[int], set[int]]]


@st.composite
def _jobs(draw: st.DrawFn) -> _Groups:
    """Communicators: number, world ranks, and those of them that have freed it; groups of one number are disjoint."""
    groups = []
    for number in range(draw(st.integers(1, 6))):
        colours = draw(st.lists(st.integers(0, 2), min_size=_NUM_RANKS, max_size=_NUM_RANKS))
        for colour in set(colours):
            members = {rank for rank in range(_NUM_RANKS) if colours[rank] == colour}
            freed = draw(st.sets(st.sampled_from(sorted(members)))) if draw(st.booleans()) else set()
            groups.append((number, members, freed))
    return groups


def _lists(groups: _Groups) -> list[list[Named]]:
    """What each rank makes."""
    named: dict[int, list[Named]] = defaultdict(list)
    for number, members, freed in groups:
        for rank in members - freed:
            named[rank].append(Named(number, min(members), len(members)))
    told = [each for rank in range(_NUM_RANKS) for each in named[rank]]
    return [choose_common(reversed(named[rank]), told) for rank in range(_NUM_RANKS)]


@given(_jobs())
def test_what_all_members_still_have_is_made_by_all_of_them_and_nothing_else(groups: _Groups) -> None:
    lists = _lists(groups)
    for number, members, freed in groups:
        name = Named(number, min(members), len(members))
        for rank in members:
            assert (name in lists[rank]) == (not freed)


@given(_jobs())
def test_every_communicator_is_made_though_each_blocks_until_all_its_members_have_come(groups: _Groups) -> None:
    left = _lists(groups)
    while any(left):
        standing = [each[0] for each in left if each]
        ready = [name for name in standing if standing.count(name) == name.num_members]
        assert ready, standing
        for each in left:
            if each and each[0] in ready:
                each.pop(0)
