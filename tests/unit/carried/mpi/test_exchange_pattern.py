"""Plans of small collectives: everybody gets what is meant, however messages are late."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, strategies as st

from remesh.carried.mpi.calls.table import Kind
from remesh.carried.mpi.lower.exchange_pattern import Do, ExchangeStep, plan_doubling, plan_small

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def fold_of(size: int) -> str:
    """What the module says in three points, at once: blocks of one or two, then of twice as many."""
    power = 1 << (size.bit_length() - 1)
    names = [chr(ord("a") + rank) for rank in range(size)]
    extra = size - power
    blocks = [f"({names[2 * i]}{names[2 * i + 1]})" for i in range(extra)] + names[2 * extra :]
    while len(blocks) > 1:
        blocks = [f"({left}{right})" for left, right in zip(blocks[::2], blocks[1::2], strict=True)]
    return blocks[0]


def run(
    plans: Sequence[Sequence[ExchangeStep]], blocks: Iterable[str | list[str]], order: random.Random
) -> list[list[str]]:
    """Do all plans, a step of any rank that can do one at a time; the blocks of each then."""
    have = [[*each] for each in blocks]
    left = [deque(plan) for plan in plans]
    on_way: dict[tuple[int, int], deque[list[str]]] = defaultdict(deque)
    while any(left):
        heads = [(r, steps[0]) for r, steps in enumerate(left) if steps]
        rank, step = order.choice([(r, s) for r, s in heads if s.do in (Do.GIVE, Do.ROTATE) or on_way[s.peer, r]])
        left[rank].popleft()
        mine, place = have[rank], slice(step.first, step.first + step.count)
        if step.do is Do.ROTATE:
            mine[: step.count] = mine[step.first : step.count] + mine[: step.first]
        elif step.do is Do.GIVE:
            assert len(mine[place]) == step.count
            on_way[rank, step.peer].append(mine[place])
        else:
            theirs = on_way[step.peer, rank].popleft()
            assert len(theirs) == step.count
            if step.do is Do.TAKE:
                mine += [""] * (place.stop - len(mine))
                mine[place] = theirs
            else:
                one, other = (theirs[0], mine[0]) if step.do is Do.FOLD_BEFORE else (mine[0], theirs[0])
                mine[0] = f"({one}{other})"
    assert not any(on_way.values())
    return have


@given(st.integers(1, 26), st.randoms(use_true_random=False))
def test_everybody_has_the_fold_of_all_in_order_of_ranks(size: int, order: random.Random) -> None:
    plans = [plan_doubling(range(size), rank) for rank in range(size)]
    assert run(plans, _LETTERS[:size], order) == [[fold_of(size)]] * size


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


def _plain(fold: str) -> str:
    return fold.replace("(", "").replace(")", "")


@given(st.integers(1, 26), st.data(), st.randoms(use_true_random=False))
def test_with_a_root_all_get_what_is_meant_for_them(size: int, data: st.DataObject, order: random.Random) -> None:
    root, letters = data.draw(st.integers(0, size - 1)), [*_LETTERS[:size]]
    plans = {
        kind: [plan_small(kind, range(size), rank, root) for rank in range(size)]
        for kind in (Kind.BCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)
    }
    of_root = ["x" if rank == root else "?" for rank in range(size)]
    assert run(plans[Kind.BCAST], of_root, order) == [["x"]] * size
    (folded,) = run(plans[Kind.REDUCE], letters, order)[root]
    assert _plain(folded) == "".join(letters[root:] + letters[:root])
    assert run(plans[Kind.GATHER], letters, order)[root] == letters
    scattered = run(plans[Kind.SCATTER], [letters if rank == root else ["?"] for rank in range(size)], order)
    assert [each[0] for each in scattered] == letters


@given(st.integers(1, 26), st.randoms(use_true_random=False))
def test_scans_fold_what_is_below_in_order(size: int, order: random.Random) -> None:
    for kind, own in ((Kind.SCAN, 1), (Kind.EXSCAN, 0)):
        folds = run([plan_small(kind, range(size), rank, 0) for rank in range(size)], _LETTERS[:size], order)
        found = [_plain(fold) for (fold,) in folds]
        assert found[1 - own :] == [_LETTERS[: rank + own] for rank in range(1 - own, size)]


@pytest.mark.parametrize("kind", [Kind.BCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER, Kind.SCAN, Kind.EXSCAN])
@given(size=st.integers(1, 300), data=st.data())
def test_a_rank_takes_as_often_as_the_size_doubles(kind: Kind, size: int, data: st.DataObject) -> None:
    root, rank = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    taken = [step for step in plan_small(kind, range(size), rank, root) if step.do not in (Do.GIVE, Do.ROTATE)]
    assert len(taken) <= (size - 1).bit_length() + (kind == Kind.EXSCAN)
