"""Choice of snapshots: which rank takes which, and when one may be thrown away."""

from __future__ import annotations

from hypothesis import given, strategies as st

from remesh.elasticity.snapshots.choice import choose_boxes
from remesh.elasticity.snapshots.shelves import choose_readers, decide_retired
from remesh.layout import Box, Layout, Shard
from remesh.resharding.model.tasks import TensorMove


def move(name: str, holders: list[tuple[int, Box]]) -> TensorMove:
    layout = Layout((8,), tuple(Shard(rank, box) for rank, box in holders), "float32")
    return TensorMove(name, layout, layout)


LOW, HIGH, ALL = Box((0,), (4,)), Box((4,), (8,)), Box((0,), (8,))


def test_replicas_on_two_nodes_need_no_snapshot() -> None:
    moves = [move("w", [(0, LOW), (1, HIGH), (2, LOW), (3, HIGH)])]
    for rank in range(4):
        choice = choose_boxes(moves, rank, {0: 0, 1: 0, 2: 1, 3: 1})
        assert not choice.boxes
        assert "replicas serve" in choice.reason


def test_one_box_on_one_node_makes_every_box_be_taken_once() -> None:
    """w is sharded over nodes, b is replicated: a step to go back to needs b as well."""
    moves = [move("w", [(0, LOW), (1, HIGH)]), move("b", [(0, ALL), (1, ALL)])]
    choices = [choose_boxes(moves, rank, {0: 0, 1: 1}).boxes for rank in (0, 1)]
    assert choices == [{"w": {LOW}, "b": {ALL}}, {"w": {HIGH}}]


def test_job_of_one_node_keeps_its_snapshots_there() -> None:
    choice = choose_boxes([move("w", [(0, LOW), (1, HIGH)])], 1, {0: 0, 1: 0})
    assert choice.boxes == {"w": {HIGH}}
    assert "kept here only" in choice.reason


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_all_boxes_are_taken_once_or_none_is_needed(holders: list[list[int]], nodes: list[int]) -> None:
    """Any replicas on any nodes: after the loss of any node, memory or snapshots still have every box."""
    moves = [move(f"t{index}", [(rank, ALL) for rank in ranks]) for index, ranks in enumerate(holders)]
    node_of = dict(enumerate(nodes))
    taken = [rank for rank in range(4) for name in choose_boxes(moves, rank, node_of).boxes for _ in name[:1]]
    alone = any(len({node_of[rank] for rank in ranks}) < 2 for ranks in holders)
    assert len(taken) == (len(holders) if alone else 0)


def test_rank_reads_its_seats_shelf_and_the_others_are_shared_out() -> None:
    kept = [(1, 0), (2, 0), (2, 1), (2, 6), (2, 7)]
    assert choose_readers(kept, [0, 2]) == {0: [(1, 0), (2, 0), (2, 7)], 2: [(2, 1), (2, 6)]}
    assert choose_readers([], [0]) == {0: []}


def test_shelf_goes_once_a_later_generation_has_two_versions() -> None:
    """Generation 3's shelves stay while generation 4 has one version: a death now may need the older ones."""
    kept = {(3, 0): 2, (3, 1): 2, (4, 0): 1}
    assert decide_retired(kept) == []
    assert decide_retired({**kept, (4, 0): 2}) == [(3, 0), (3, 1)]
    assert decide_retired({}) == []
