"""Which way is cheapest follows latency and size as the closed forms say."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.resharding.schedule.paper.cost import COSTS, SliceCast, best_num_chunks, cost_of

problems = st.builds(
    SliceCast,
    nbytes=st.integers(1, 1 << 32),
    num_hosts=st.integers(1, 40),
    num_devices=st.integers(1, 8),
    rate_bytes_per_s=st.floats(1e6, 1e11),
    latency_s=st.floats(0, 1e-2),
    chunk_bytes=st.one_of(st.none(), st.integers(1 << 16, 1 << 26)),
)


def cheapest(problem: SliceCast) -> str:
    return min(COSTS, key=lambda name: cost_of(name, problem).seconds)


@given(problems)
def test_no_way_is_faster_than_one_copy(problem: SliceCast) -> None:
    assert min(cost_of(name, problem).seconds for name in COSTS) >= problem.wire_s * (1 - 1e-12)


@given(problems, st.integers(1, 50))
def test_the_number_of_chunks_is_the_best_one_within_its_limits(problem: SliceCast, delay: int) -> None:
    def seconds(num: int) -> float:
        return (num + delay) * (problem.wire_s / num + problem.latency_s)

    found = best_num_chunks(problem, delay)
    assert found >= problem.num_messages() >= 1
    if problem.latency_s > 0:
        for other in (found - 1, found + 1):
            if problem.num_messages() <= other <= problem.nbytes // (128 << 10):
                # The best real number is rounded, and the function is flat there.
                assert seconds(found) <= seconds(other) * 1.02


def test_small_slices_go_directly_or_down_a_tree_and_large_ones_down_a_pipeline() -> None:
    link = {"rate_bytes_per_s": 1e9, "latency_s": 1e-4}
    assert cheapest(SliceCast(1000, 2, **link)) == "send_recv"
    assert cheapest(SliceCast(1000, 20, **link)) == "tree"
    assert cheapest(SliceCast(1 << 30, 3, **link)) == "chain"
    assert cheapest(SliceCast(1 << 30, 100, **link)) == "two_trees"


def test_the_chain_is_left_where_bytes_fall_below_latency_times_rate_times_hosts() -> None:
    link = {"rate_bytes_per_s": 1e9, "latency_s": 1e-3}
    for hosts in (4, 8, 16):
        limit = int(1e6 * hosts)
        assert cheapest(SliceCast(limit // 20, hosts, **link)) not in ("chain", "two_trees")
        assert cheapest(SliceCast(limit * 20, hosts, **link)) in ("chain", "two_trees")


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one byte"):
        SliceCast(0, 1)
    with pytest.raises(PlanError, match="'magic'.*chain"):
        cost_of("magic", SliceCast(1, 1))
