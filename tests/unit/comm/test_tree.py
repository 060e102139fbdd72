"""The tree of ranks through which short words go: everybody is in it once, and few hops away."""

from __future__ import annotations

from hypothesis import given, strategies as st

from remesh.comm.word_tree import TreePlace

sizes = st.integers(1, 300)


@given(sizes, st.integers(0, 299))
def test_every_rank_but_the_root_stands_below_exactly_one_other(size: int, root: int) -> None:
    root %= size
    places = {rank: TreePlace.of(rank, size, root) for rank in range(size)}
    assert [rank for rank, place in places.items() if place.above is None] == [root]
    below = [child for place in places.values() for child in place.below]
    assert sorted([root, *below]) == list(range(size))
    assert all(rank in places[place.above].below for rank, place in places.items() if place.above is not None)


@given(sizes, st.integers(0, 299))
def test_two_hops_are_enough_for_nine_ranks_and_four_for_seventy_three(size: int, root: int) -> None:
    root %= size

    def depth(rank: int) -> int:
        above = TreePlace.of(rank, size, root).above
        return 0 if above is None else 1 + depth(above)

    deepest = max(depth(rank) for rank in range(size))
    assert deepest <= (0 if size == 1 else 1 if size <= 9 else 2 if size <= 73 else 3)
