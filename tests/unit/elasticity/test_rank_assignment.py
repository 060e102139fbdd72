"""Who takes a free seat, and who keeps its snapshots."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from remesh.elasticity.model.generation import Generation, MeetingRules, NodeInfo, WorkerReport, decide_generation
from remesh.elasticity.model.mesh_policy import make_template
from remesh.elasticity.model.rank_assignment import RANKS_PER_SPARE, MeshMember, choose_for_ranks, compute_keepers

counts = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def make_members(per_node: list[int], first_rank: int | None = 0) -> list[MeshMember]:
    nodes = [node for node, count in enumerate(per_node) for _ in range(count)]
    return [MeshMember(-1 if first_rank is None else rank, node, rank, rank) for rank, node in enumerate(nodes)]


@given(counts, counts)
def test_second_copy_is_elsewhere_and_spares_keep_a_bounded_share(seats: list[int], spares: list[int]) -> None:
    members, standby = make_members(seats), make_members(spares, None)
    keepers = compute_keepers(members, standby)
    nodes = {member.node for member in members}
    num_spares = Counter(spare.node for spare in standby)
    ring = Counter[int]()
    for member in members:
        keeper = keepers[member.rank]
        has_other = bool(nodes - {member.node})
        assert keeper != member.node
        assert keeper is not None or not has_other
        if keeper is not None:
            ring[keeper] += 1
    most = max(seats)
    for node, count in ring.items():
        # A node keeps no more than the ring gives it and its spares have room for.
        assert count <= most + RANKS_PER_SPARE * num_spares[node]


@given(st.integers(1, 5), st.integers(0, 4))
def test_spares_that_suffice_keep_all_seats_alike(num_seats: int, num_more: int) -> None:
    """A node for each seat, and at least one spare on a node of its own for every two."""
    num_spares = -(-num_seats // RANKS_PER_SPARE) + num_more
    members = make_members([1] * num_seats)
    standby = [MeshMember(-1, 100 + spare, 0, spare) for spare in range(num_spares)]
    kept = Counter(compute_keepers(members, standby).values())
    assert all(node is not None and node >= 100 for node in kept)
    assert max(kept.values()) - min(kept[100 + spare] for spare in range(num_spares)) <= 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_every_seat_gets_one_and_nobody_is_forgotten(nodes: list[int], data: st.DataObject) -> None:
    candidates = [(node, f"worker {at}") for at, node in enumerate(nodes)]
    free = list(range(data.draw(st.integers(0, len(nodes)))))
    near = {seat: data.draw(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=2)) for seat in free}
    taken, rest = choose_for_ranks(free, candidates, near)
    assert sorted(taken) == free
    assert sorted([*taken.values(), *rest]) == sorted(candidates)
    assert rest == [one for one in candidates if one in rest], "those who are left keep their order"
    for seat, (node, _) in taken.items():
        is_wanted = node not in near[seat] and any(other in near[seat] for other, _ in rest)
        assert not is_wanted, "somebody nearer is left"


def test_spare_that_follows_a_seats_snapshots_takes_it() -> None:
    """Four nodes with a seat, two spares: each keeps two seats. A node dies, and the spare that kept its seat comes."""
    template = make_template({"dp": 4}).to_json()
    rules = MeetingRules(1, 6, last_call_s=5.0, join_timeout_s=60.0, absence_timeout_s=20.0)
    nodes = {index: NodeInfo(index, f"node-{index}", "127.0.0.1", 1, 1) for index in range(6)}
    here = {index: (WorkerReport(0, 100 + index, template, 3 if index < 4 else None),) for index in range(6)}
    first = decide_generation(None, nodes, here, {}, rules, 0.0)
    assert isinstance(first, Generation)
    assert first.keepers == {0: 4, 1: 5, 2: 4, 3: 5}
    for lost in range(4):
        left = {index: reports for index, reports in here.items() if index != lost}
        plan = decide_generation(first, nodes, left, {lost: "port refused"}, rules, 0.0)
        assert isinstance(plan, Generation)
        assert plan.members[lost].node == first.keepers[lost]
