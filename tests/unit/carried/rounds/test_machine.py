"""Verdicts of one wave, and what a round makes of refusals, losses and silence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from remesh.carried.rounds.answers import Answers
from remesh.carried.rounds.clock import decide_by_clock
from remesh.carried.rounds.drain import compute_missing, find_traffic, is_drained
from remesh.carried.rounds.round_machine import (
    STUCK_TIMEOUT_S,
    Ask,
    Commit,
    End,
    Ending,
    Obstacle,
    Round,
    RoundPhase,
    TakeImage,
)
from remesh.carried.rounds.status import Activity, ClockProgress, CollectiveProgress, Status, pairs
from remesh.foundation.errors import FormatError

_WORLD = (0, 1)


def _status(rank: int, number: int = 0, activity: Activity = Activity.COMPUTING, **more: object) -> Status:
    """All collectives of the world up to a number are complete; who is held is inside of the next."""
    at = ("w",) if activity is Activity.HELD else ()
    return replace(Status(rank, activity, at, (("w", ClockProgress(number, number, _WORLD)),)), **more)


def _freed(rank: int, number: int) -> Status:
    return Status(rank, Activity.COMPUTING, (), (("w", ClockProgress(number, number, (), number)),))


def test_the_clock_waits_for_who_is_below_what_is_complete_elsewhere() -> None:
    first = decide_by_clock([_status(0, 3), _status(1, 2)], None, is_stuck=False)
    assert dict(first.targets) == {"w": 3} and not first.aligned
    then = decide_by_clock([_status(0, 3), _status(1, 2)], {"w": 3}, is_stuck=False)
    assert not then.aligned and "ranks [1] are below" in then.reason
    assert decide_by_clock([_status(0, 3), _status(1, 3)], {"w": 3}, is_stuck=False).aligned


def test_the_first_wave_decides_nothing_as_who_answered_early_may_have_entered_since() -> None:
    assert not decide_by_clock([_status(0), Status(1, Activity.COMPUTING)], None, is_stuck=False).aligned


@pytest.mark.parametrize(
    ("wave", "target", "aligned"),
    [
        ([_status(0, 3), _status(1, 3)], 3, True),
        ([_status(0, 3), _status(1, 2)], 3, False),
        # Inside of what is complete nowhere: nobody waits for who has not entered it.
        ([_status(0, 3, Activity.HELD), _status(1, 3)], 3, True),
        ([_status(0, 3, Activity.HELD), _status(1, 3, Activity.HELD)], 3, True),
        # The second is complete on rank 0, and the first is not: rank 1 has to come to both, rank 0 to the first.
        ([Status(0, Activity.INSIDE, (), (("w", ClockProgress(2, 0, _WORLD)),)), _status(1, 2)], 2, False),
        # It says nothing, and may not have heard of it yet.
        ([_status(0, 1), Status(1, Activity.COMPUTING)], 0, False),
        # Rank 1 has freed it, and says at what number.
        ([_status(0, 2), _freed(1, 3)], 3, False),
        ([_status(0, 3), _freed(1, 3)], 3, True),
        ([_freed(0, 3), _freed(1, 3)], 3, True),
        # A barrier that only rank 0 has entered, and that has ended by its timeout.
        ([_freed(0, 4), _freed(1, 3)], 4, True),
        # Rank 1 is still inside of the third.
        ([_freed(0, 3), Status(1, Activity.INSIDE, (), (("w", ClockProgress(3, 2, (), 3)),))], 3, False),
    ],
)
def test_ranks_are_aligned_where_what_is_complete_anywhere_is_so_on_all(
    wave: list[Status], target: int, aligned: bool
) -> None:
    told = {"w": target} if target else {}
    verdict = decide_by_clock(wave, told, is_stuck=False)
    assert verdict.aligned == aligned
    assert dict(decide_by_clock(wave, None, is_stuck=False).targets).get("w", 0) >= target


def test_a_target_is_raised_for_who_is_below_another_and_waits_beyond_it_and_for_nobody_else() -> None:
    known = {"a": ClockProgress(0, 0, (0, 1)), "b": ClockProgress(2, 2, (1, 2)), "c": ClockProgress(4, 4, (0, 2))}
    ahead = Status(0, Activity.HELD, ("c",), (("a", ClockProgress(1, 1, (0, 1))), ("c", known["c"])))
    behind = Status(1, Activity.HELD, ("b",), (("a", known["a"]), ("b", known["b"])))
    other = Status(2, Activity.COMPUTING, (), (("b", known["b"]), ("c", known["c"])))
    verdict = decide_by_clock([ahead, behind, other], {"a": 1, "b": 2, "c": 4}, is_stuck=False)
    assert not verdict.aligned and dict(verdict.targets) == {"a": 1, "b": 3, "c": 4}
    stuck = decide_by_clock([ahead, behind, other], {"a": 1, "b": 2, "c": 4}, is_stuck=True)
    assert dict(stuck.targets) == {"a": 1, "b": 3, "c": 5}


def test_where_nobody_is_below_a_target_nothing_that_stands_still_raises_any() -> None:
    wave = [_status(0, 3, Activity.HELD), _status(1, 3)]
    verdict = decide_by_clock(wave, {"w": 3}, is_stuck=True)
    assert verdict.aligned and dict(verdict.targets) == {"w": 3}


def test_who_only_needs_time_to_complete_what_it_is_inside_of_raises_no_target() -> None:
    ending = Status(0, Activity.INSIDE, (), (("w", ClockProgress(0, 0, _WORLD)),))
    verdict = decide_by_clock([ending, _status(1, 1, Activity.HELD)], {"w": 1}, is_stuck=True)
    assert not verdict.aligned and dict(verdict.targets) == {"w": 1}


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3))
def test_missing_messages_are_those_of_the_dumb_count(sent: list[list[int]]) -> None:
    received = [[max(sent[source][rank] - 1, 0) for source in range(3)] for rank in range(3)]
    statuses = [
        Status(rank, Activity.COMPUTING, sent=pairs(sent[rank]), received=pairs(received[rank]), closed=True)
        for rank in range(3)
    ]
    expected = {(s, d): 1 for s in range(3) for d in range(3) if sent[s][d]}
    assert {(each.source, each.destination): each.messages for each in compute_missing(statuses)} == expected
    assert is_drained(statuses, statuses)[0] == (not expected)


def test_one_wave_alone_does_not_prove_that_the_network_is_empty() -> None:
    wave = [_status(rank, closed=True) for rank in _WORLD]
    assert not is_drained(None, wave)[0]
    assert is_drained(wave, wave)[0]


def test_what_a_round_waits_for_is_named_where_it_is_an_access_to_a_file() -> None:
    loud = [_status(0, closed=True, quiet=False), _status(1, closed=True, quiet=False, in_file=True)]
    drained, why = is_drained(loud, loud)
    assert not drained
    assert why == "ranks [0, 1] have operations under way; ranks [1] are in the middle of an access to a file"
    assert Status.from_json(loud[1].to_json()).in_file


def test_a_round_goes_from_intent_to_commit() -> None:
    state, told = Round(2, stop=True).begin(0.0)
    steps = []
    now_s = 0.0
    while not isinstance(told[0], TakeImage):
        assert isinstance(told[0], Ask)
        ask = told[0]
        steps.append(ask.step)
        now_s += 0.01
        for rank in _WORLD:
            assert rank == 0 or not told or told == ()
            status = _status(rank, 5, closed=ask.step is RoundPhase.CLOSE)
            state, told = state.on_status(status, ask.wave, now_s)
    assert steps == [RoundPhase.HOLD, RoundPhase.HOLD, RoundPhase.CLOSE, RoundPhase.CLOSE]
    state, told = state.on_imaged(1, "")
    assert told == ()
    state, told = state.on_imaged(0, "")
    assert told == (Commit(),)
    state, told = state.on_committed("")
    assert told == (End(Ending.STOPPED, "committed"),)
    assert state.phase is RoundPhase.DONE


def test_a_refusal_gives_the_round_up_before_anything_is_stopped() -> None:
    state, told = Round(2, stop=False).begin(0.0)
    state, told = state.on_status(_status(1, refusals=("descriptor 5, a socket",)), state.wave, 0.0)
    assert told == (End(Ending.GIVEN_UP, "rank 1 cannot be imaged: descriptor 5, a socket", Obstacle.REFUSED),)


@pytest.mark.parametrize("rank", _WORLD)
@pytest.mark.parametrize(("refused", "obstacle"), [(False, Obstacle.FAILED), (True, Obstacle.REFUSED)])
def test_an_image_that_failed_gives_the_round_up(rank: int, refused: bool, obstacle: Obstacle) -> None:
    state = replace(Round(2, stop=False), phase=RoundPhase.IMAGE)
    _, told = state.on_imaged(rank, "it cannot be", refused=refused)
    assert told == (End(Ending.GIVEN_UP, f"rank {rank} could not write its image: it cannot be", obstacle),)


def test_a_wave_that_only_has_to_be_confirmed_is_followed_at_once_and_one_with_traffic_is_not() -> None:
    state = replace(Round(2, stop=False), phase=RoundPhase.CLOSE, wave=3, answers=Answers.none(2))
    for sent, waits in ((((1, 1),), True), ((), False)):
        asked = state
        for rank in _WORLD:
            status = _status(rank, closed=True, sent=sent if rank == 0 else ())
            asked, told = asked.on_status(status, 3, 1.0)
        assert isinstance(told[0], Ask) and (told[0].after_s > 0) == waits


def test_a_rank_that_dies_ends_the_round_in_any_phase() -> None:
    for phase in (RoundPhase.HOLD, RoundPhase.CLOSE, RoundPhase.IMAGE, RoundPhase.COMMIT):
        _, told = replace(Round(2, stop=False), phase=phase).on_lost(1, "killed")
        assert told == (End(Ending.LOST, "rank 1 is gone: killed"),)
    assert replace(Round(2, stop=False), phase=RoundPhase.DONE).on_lost(1, "killed")[1] == ()


def test_a_round_that_finds_no_cut_is_given_up_after_its_limit_but_not_while_images_are_written() -> None:
    state, _ = Round(2, stop=False, limit_s=5.0).begin(100.0)
    assert state.on_time(104.0)[1] == ()
    assert state.on_time(105.1)[1][0].ending is Ending.GIVEN_UP
    assert replace(state, phase=RoundPhase.IMAGE).on_time(1e9)[1] == ()


def test_nothing_that_moves_raises_the_targets_of_who_is_held() -> None:
    # Rank 0 has left "w"; rank 1 waits for a message that rank 2 will send after "x", where it is held.
    wave = [
        Status(0, Activity.COMPUTING, (), (("w", ClockProgress(1, 1, (0, 1))),)),
        Status(1, Activity.WAITING, (), (("w", ClockProgress(0, 0, (0, 1))),)),
        Status(2, Activity.HELD, ("x",), (("x", ClockProgress(0, 0, (2,))),)),
    ]
    state, told = Round(3, stop=False).begin(0.0)
    raised_at = None
    for number in range(60):
        assert isinstance(told[0], Ask)
        if dict(told[0].targets or ()).get("x"):
            raised_at = number * 0.01
            break
        ask = told[0]
        for status in wave:
            state, told = state.on_status(status, ask.wave, number * 0.01)
    assert raised_at is not None and raised_at >= STUCK_TIMEOUT_S


def test_late_answers_are_passed_over() -> None:
    state, _ = Round(2, stop=False).begin(0.0)
    for rank in _WORLD:
        state, _ = state.on_status(_status(rank), 1, 0.0)
    assert state.wave == 2
    assert state.on_status(_status(0), 1, 0.0) == (state, ())


def test_a_status_survives_json_and_nonsense_is_refused() -> None:
    status = _status(1, 4, Activity.HELD, sent=((0, 3),), received=((0, 1),), quiet=False, closed=True)
    status = replace(status, collectives=(("w", CollectiveProgress(3, 2)),))
    assert Status.from_json(status.to_json()) == status
    for broken in (None, {}, {**status.to_json(), "activity": "asleep"}, {**status.to_json(), "sent": [[1]]}):
        with pytest.raises(FormatError, match="reading the status"):
            Status.from_json(broken)


def _entered(rank: int, completed: int, entered: int) -> Status:
    """Of a library that completes collectives by itself."""
    return Status(rank, Activity.COMPUTING, (), (("w", ClockProgress(completed, completed, _WORLD, entered)),))


@pytest.mark.parametrize(
    ("wave", "target", "then"),
    [
        # What rank 1 has not entered, and may not, ends nowhere.
        ([_entered(0, 3, 5), _entered(1, 3, 3)], 3, 3),
        # All are inside of the fourth: it ends whatever we say.
        ([_entered(0, 3, 5), _entered(1, 3, 4)], 3, 4),
        ([_entered(0, 3, 5), Status(1, Activity.COMPUTING)], 3, 3),
    ],
)
def test_what_all_have_entered_counts_as_complete(wave: list[Status], target: int, then: int) -> None:
    verdict = decide_by_clock(wave, {"w": target}, is_stuck=False)
    assert dict(verdict.targets) == {"w": then}
    assert verdict.aligned == (then == target)


def test_a_standing_that_says_nothing_of_entering_is_read_as_before() -> None:
    status = _status(0, 3)
    written = status.to_json()
    written["standings"] = [standing[:4] for standing in written["standings"]]
    assert Status.from_json(written) == status
    assert Status.from_json(_entered(0, 3, 5).to_json()) == _entered(0, 3, 5)


def _closed(rank: int, *known: tuple[str, int, int]) -> Status:
    told = tuple((key, CollectiveProgress(entered, ended)) for key, entered, ended in known)
    return Status(rank, Activity.COMPUTING, closed=True, collectives=told)


def test_what_all_have_entered_ends_before_the_network_counts_as_empty_and_nothing_else_has_to() -> None:
    inside = [_closed(0, ("w", 4, 3)), _closed(1, ("w", 5, 3)), _closed(2, ("w", 4, 4))]
    assert find_traffic(inside) == (
        "rank 0 is inside of collective 4 on communicator w, which all its members have entered"
    )
    through = [_closed(0, ("w", 4, 4)), _closed(1, ("w", 5, 4)), _closed(2, ("w", 4, 4))]
    assert find_traffic(through) == "", "rank 1 stands in one that others have not come to"


def test_who_says_nothing_of_a_communicator_has_freed_it_and_keeps_nobody() -> None:
    assert find_traffic([_closed(0), _closed(1, ("w", 2, 2), ("x", 1, 1))]) == ""
    # Who has freed it was through the second one, so all have entered that.
    assert "rank 1 is inside of collective 2 on communicator w" in find_traffic([_closed(0), _closed(1, ("w", 2, 1))])
