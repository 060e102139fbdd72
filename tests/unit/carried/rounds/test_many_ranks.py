"""What keeps the work of a round near linear: answers in blocks, members in runs, to each rank its own targets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from remesh.carried.rounds.answers import Answers
from remesh.carried.rounds.clock import split_targets
from remesh.carried.rounds.members import pack_members, unpack_members
from remesh.carried.rounds.status import Activity, ClockProgress, Status


@given(st.integers(1, 40), st.data())
def test_answers_are_those_of_a_dictionary(num_ranks: int, data: st.DataObject) -> None:
    answers: Answers[int] = Answers.none(num_ranks)
    expected: dict[int, int] = {}
    for rank, answer in data.draw(st.lists(st.tuples(st.integers(0, num_ranks - 1), st.integers(1, 9)))):
        before, answers = answers, answers.add(rank, answer)
        assert before.given() == tuple(expected[each] for each in sorted(expected))
        expected[rank] = answer
    assert answers.given() == tuple(expected[each] for each in sorted(expected))
    assert answers.silent() == [rank for rank in range(num_ranks) if rank not in expected]
    assert answers.num_missing == len(answers.silent())


@given(st.sets(st.integers(0, 60)))
def test_members_come_back_from_a_message_whatever_they_are(members: set[int]) -> None:
    told = json.loads(json.dumps(pack_members(sorted(members))))
    assert unpack_members(told) == tuple(sorted(members))


@given(st.integers(0, 99), st.integers(1, 99), st.integers(4, 5000))
def test_a_group_of_any_size_whose_ranks_are_evenly_apart_is_one_run(start: int, step: int, count: int) -> None:
    members = tuple(range(start, start + step * count, step))
    assert pack_members(members) == [[start, members[-1] + 1, step]]
    assert unpack_members(pack_members(members)) == members
    assert unpack_members(pack_members(members)) is unpack_members(pack_members(members))


def test_members_as_older_checkpoints_have_them_are_read() -> None:
    assert unpack_members([0, 1, 2, 3, 7]) == (0, 1, 2, 3, 7)


@pytest.mark.parametrize("told", [[[0, 1 << 40, 1]], [[0, 1]], [[0, 5, 0]], ["a"], [None]])
def test_what_is_no_list_of_members_is_refused(told: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        unpack_members(told)


def _status(rank: int, **members: tuple[int, ...]) -> Status:
    standings = tuple((key, ClockProgress(1, 1, members[key])) for key in sorted(members))
    return Status(rank, Activity.COMPUTING, standings=standings)


def test_each_rank_is_told_the_targets_of_what_it_takes_part_in() -> None:
    wave = (
        _status(0, w=(0, 1, 2), a=(0, 2)),
        _status(1, w=(0, 1, 2), left=()),
        _status(2, w=(0, 1, 2)),  # has not heard of "a" yet
    )
    told = split_targets({"w": 3, "a": 1, "left": 5}, wave)
    of_all = {"w": 3}
    assert told == [{**of_all, "a": 1}, of_all, {**of_all, "a": 1}]
