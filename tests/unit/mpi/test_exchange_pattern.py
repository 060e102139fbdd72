"""Recursive doubling: everybody gets the fold of all in order of ranks, however messages are late."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.lower.exchange_pattern import Do, ExchangeStep, plan_doubling


def fold_of(size: int) -> str:
    """What the module says in three points, at once: blocks of one or two, then of twice as many."""
    power = 1 << (size.bit_length() - 1)
    names = [chr(ord("a") + rank) for rank in range(size)]
    extra = size - power
    blocks = [f"({names[2 * i]}{names[2 * i + 1]})" for i in range(extra)] + names[2 * extra :]
    while len(blocks) > 1:
        blocks = [f"({left}{right})" for left, right in zip(blocks[::2], blocks[1::2], strict=True)]
    return blocks[0]


def run(plans: list[tuple[ExchangeStep, ...]], order: random.Random) -> list[str]:
    """Do all plans, a step of any rank that can do one at a time."""
    folds = [chr(ord("a") + rank) for rank in range(len(plans))]
    left = [deque(plan) for plan in plans]
    on_way: dict[tuple[int, int], str] = {}
    while any(left):
        ready = [
            r for r, steps in enumerate(left) if steps and (steps[0].do is Do.GIVE or (steps[0].peer, r) in on_way)
        ]
        rank = order.choice(ready)
        step = left[rank].popleft()
        if step.do is Do.GIVE:
            assert (rank, step.peer) not in on_way
            on_way[rank, step.peer] = folds[rank]
            continue
        theirs = on_way.pop((step.peer, rank))
        both = {Do.FOLD_BEFORE: f"({theirs}{folds[rank]})", Do.FOLD_AFTER: f"({folds[rank]}{theirs})", Do.TAKE: theirs}
        folds[rank] = both[step.do]
    assert not on_way
    return folds


@given(st.integers(1, 26), st.randoms(use_true_random=False))
def test_everybody_has_the_fold_of_all_in_order_of_ranks(size: int, order: random.Random) -> None:
    plans = [plan_doubling(range(size), rank) for rank in range(size)]
    assert run(plans, order) == [fold_of(size)] * size


@given(st.integers(1, 300))
def test_nobody_is_given_to_or_taken_from_twice(size: int) -> None:
    for rank in range(size):
        plan = plan_doubling(range(size), rank)
        for gives in (True, False):
            peers = [step.peer for step in plan if (step.do is Do.GIVE) is gives]
            assert len(peers) == len(set(peers)) and rank not in peers


@given(st.integers(1, 300))
def test_it_takes_a_latency_for_each_doubling_and_two_more_for_the_rest(size: int) -> None:
    rounds = max(sum(step.do is not Do.GIVE for step in plan_doubling(range(size), rank)) for rank in range(size))
    power = size.bit_length() - 1
    assert rounds <= power + (size != 1 << power)


@given(st.permutations(range(20)), st.integers(2, 20))
def test_peers_are_world_ranks_of_members(world: list[int], size: int) -> None:
    members = world[:size]
    for rank, plan in enumerate(plan_doubling(members, rank) for rank in range(size)):
        places = [ExchangeStep(step.do, members[step.peer]) for step in plan_doubling(range(size), rank)]
        assert list(plan) == places
