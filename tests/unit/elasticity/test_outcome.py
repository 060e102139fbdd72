"""The cause of a failed job is the earliest failure that follows from no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from remesh.elasticity.model.outcome import WorkerFailure, decide_cause, describe_failure

LOST = "torch.distributed.DistNetworkError: Connection reset by peer"


def failure(rank: int, time_s: float, message: str = "ValueError: no", exit_code: int = 1) -> WorkerFailure:
    trace = f'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    go()\n{message}\n'
    return WorkerFailure(rank, rank % 2, f"n{rank // 2}", 100 + rank, exit_code, time_s, message, trace)


def test_rank_whose_peer_was_lost_is_no_cause_though_its_clock_runs_behind() -> None:
    lost = failure(0, 10.0, LOST)
    told = failure(2, 11.0, "", exit_code=-15)
    cause, reason = decide_cause([lost, failure(3, 60.0), told])
    assert cause.rank == 3
    assert reason == "earliest of 1 failures that follow from no other (3 in all)"


def test_when_all_follow_from_others_the_earliest_is_told() -> None:
    cause, _ = decide_cause([failure(1, 9.0, LOST), failure(0, 8.0, LOST)])
    assert cause.rank == 0


def test_a_rank_whose_own_error_speaks_of_connections_is_a_cause() -> None:
    """Its database is down; the others lost it."""
    mine = failure(1, 9.0, "RuntimeError: Connection refused")
    mine = replace(mine, traceback=mine.traceback.replace("go()", "raise RuntimeError(text)"))
    assert decide_cause([failure(0, 8.0, LOST), mine, failure(2, 8.5, LOST)])[0].rank == 1


def test_no_failure_has_no_cause() -> None:
    with pytest.raises(ValueError, match="empty"):
        decide_cause([])


def test_sentence_names_rank_place_and_signal() -> None:
    assert describe_failure(failure(3, 0.0, "", exit_code=-9)) == (
        "rank 3 (worker 1 of n1, pid 103) failed, killed by signal 9"
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0, 9), st.sampled_from(["boom", LOST])),
        min_size=1,
        max_size=8,
    )
)
def test_cause_is_what_a_plain_search_finds(rows: list[tuple[int, float, str]]) -> None:
    failures = [failure(*row) for row in rows]
    cause, _ = decide_cause(failures)
    pool = [one for one in failures if one.message == "boom"] or failures
    assert cause in pool
    assert not any((one.time_s, one.rank) < (cause.time_s, cause.rank) for one in pool)


def test_failure_survives_json() -> None:
    one = failure(1, 2.5)
    assert WorkerFailure.from_json(one.to_json()) == one


def test_clock_that_runs_ahead_on_one_node_does_not_change_the_cause() -> None:
    """Rank 2's node told first; the clock of rank 0's node is an hour behind."""
    first = replace(failure(2, 7200.0), order=1)
    later = replace(failure(0, 3600.0), order=2)
    assert decide_cause([later, first])[0].rank == 2
