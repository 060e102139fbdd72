"""Loads are as even as brute force can make them, and routes are trees that their hosts can send."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.resharding import assign_whole, split_senders
from remesh.resharding.model.bound import HostGroup
from remesh.resharding.model.flow import Work, spread
from tests.unit.resharding.unit_tasks import UnitTask, compute_lower_bound

HOSTS = ("a", "b", "c", "d", "e")


def host_sets(min_size: int = 1) -> st.SearchStrategy[tuple[str, ...]]:
    return st.sets(st.sampled_from(HOSTS), min_size=min_size, max_size=3).map(lambda hosts: tuple(sorted(hosts)))


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    items = []
    for _ in range(draw(st.integers(1, 6))):
        owners = draw(host_sets())
        relays = tuple(host for host in draw(host_sets(0)) if host not in owners)
        copies = draw(st.integers(2, 4)) if relays else 1
        items.append(Work(draw(st.integers(0, 50)), copies, owners, relays))
    return items


def smallest_largest_load(items: list[Work]) -> int:
    """The same by min-cut over all sets of hosts: what only they can do, divided by their number."""
    best = Fraction(0)
    for size in range(1, len(HOSTS) + 1):
        for inside in map(set, itertools.combinations(HOSTS, size)):
            forced = 0
            for item in items:
                if set(item.owners) <= inside:
                    everything = set(item.relays) <= inside
                    forced += item.weight * (item.copies if everything else 1)
            best = max(best, Fraction(forced, size))
    return -(-best.numerator // best.denominator)


@given(works())
def test_loads_are_spread_as_evenly_as_any_cut_allows(items: list[Work]) -> None:
    shares = spread(items)
    assert shares.load_bytes == smallest_largest_load(items)
    load = dict.fromkeys(HOSTS, 0)
    for item, by_worker in zip(items, shares.by_worker, strict=True):
        assert sum(by_worker.values()) == item.weight * item.copies
        assert set(by_worker) <= {*item.owners, *item.relays}
        assert sum(by_worker.get(owner, 0) for owner in item.owners) >= item.weight
        for worker, nbytes in by_worker.items():
            load[worker] += nbytes
    assert max(load.values()) <= shares.load_bytes


@st.composite
def group_lists(draw: st.DrawFn) -> list[tuple[HostGroup, int]]:
    groups = {}
    for _ in range(draw(st.integers(1, 5))):
        owners = draw(host_sets())
        receivers = tuple(host for host in draw(host_sets(0)) if host not in owners)
        groups[HostGroup(owners, receivers)] = draw(st.integers(1, 60))
    return list(groups.items())


@given(group_lists())
def test_routes_tile_the_bytes_and_reach_every_receiver_within_the_load(groups: list[tuple[HostGroup, int]]) -> None:
    split = split_senders(groups)
    sent = dict.fromkeys(HOSTS, 0)
    for (group, nbytes), routes in zip(groups, split.routes, strict=True):
        assert [route.start for route in routes] == [0, *(route.stop for route in routes[:-1])]
        assert routes[-1].stop == nbytes
        for route in routes:
            informed = set(group.owners)
            for hop in route.hops:
                assert hop.giver in informed and hop.taker not in informed
                informed.add(hop.taker)
                sent[hop.giver] += route.stop - route.start
            assert informed == {*group.owners, *group.receivers}
    assert max(sent.values()) <= split.load_bytes


@given(group_lists())
def test_the_bound_is_the_larger_of_what_must_come_in_and_what_must_go_out(groups: list[tuple[HostGroup, int]]) -> None:
    rank_of = {host: rank for rank, host in enumerate(HOSTS)}
    tasks = []
    for group, nbytes in groups:
        givers = tuple(rank_of[host] for host in group.owners)
        # Some owners want it too: they are not receivers.
        takers = tuple(sorted({*(rank_of[host] for host in group.receivers), givers[0]}))
        tasks.append(UnitTask(givers, takers, nbytes))
    bound = compute_lower_bound(tasks, dict(enumerate(HOSTS)))
    crossing = [(group, nbytes) for group, nbytes in groups if group.receivers]
    coming_in = max((sum(n for group, n in crossing if host in group.receivers) for host in HOSTS), default=0)
    going_out = smallest_largest_load([Work(nbytes, 1, group.owners) for group, nbytes in crossing])
    assert bound.bytes == max(coming_in, going_out)
    assert bound.reason


def test_the_bound_says_who_forces_it() -> None:
    hosts = {0: "trainer0", 1: "trainer1", 2: "gen0", 3: "gen1"}
    receiving = compute_lower_bound([UnitTask((0, 1), (2,), 100)], hosts)
    assert (receiving.bytes, "gen0" in receiving.reason) == (100, True)
    tasks = [UnitTask((0,), (2,), 100), UnitTask((0,), (3,), 100)]
    sending = compute_lower_bound(tasks, hosts)
    assert (sending.bytes, "trainer0" in sending.reason) == (200, True)
    assert compute_lower_bound([UnitTask((0,), (1,), 100)], dict.fromkeys(range(4), "one")).bytes == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.sets(st.integers(0, 3), min_size=1)), max_size=8))
def test_whole_items_go_to_candidates_and_equal_calls_agree(items: list[tuple[int, set[int]]]) -> None:
    weights = [weight for weight, _ in items]
    candidates = [sorted(who) for _, who in items]
    chosen = assign_whole(weights, candidates)
    assert all(who in allowed for who, allowed in zip(chosen, candidates, strict=True))
    assert chosen == assign_whole(weights, [list(reversed(who)) for who in candidates])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_whole_items_are_within_four_thirds_of_the_best_when_all_may_do_all(weights: list[int], num: int) -> None:
    chosen = assign_whole(weights, [range(num)] * len(weights))
    got = max(sum(w for w, who in zip(weights, chosen, strict=True) if who == each) for each in range(num))
    best = min(
        max(sum(w for w, who in zip(weights, each, strict=True) if who == c) for c in range(num))
        for each in itertools.product(range(num), repeat=len(weights))
    )
    assert 3 * got <= 4 * best


def test_whole_items_count_the_load_that_is_there() -> None:
    assert assign_whole([1, 1], [[0, 1], [0, 1]], {0: 5}) == [1, 1]
    assert assign_whole([], []) == []
    with pytest.raises(PlanError, match=r"item 1 .*no candidate"):
        assign_whole([4, 4], [[0], []])
    with pytest.raises(PlanError, match="own list"):
        assign_whole([4], [])
