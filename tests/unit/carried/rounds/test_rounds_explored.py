"""Checkpoint rounds under every order of events that small jobs allow: consistent cuts, and nobody is left hanging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remesh.carried.rounds.status import ClockProgress
from tests.profiles import so_many
from tests.unit.carried.rounds.job_model import Explored, Job, Rank, explore

_JOBS: dict[str, Any] = {
    "a ring with a barrier": (
        ((("send", 1), ("recv", 1), ("coll", "w")), (("recv", 0), ("send", 0), ("coll", "w"))),
        {"w": (0, 1)},
    ),
    "two collectives in a row": (
        ((("coll", "w"), ("coll", "w")), (("coll", "w"), ("send", 0), ("coll", "w"))),
        {"w": (0, 1)},
    ),
    # Rank 1 is behind on "a" and needs "c" first, which stands at its target.
    "a chain of communicators": (
        ((("coll", "a"), ("coll", "b")), (("coll", "c"), ("coll", "a")), (("coll", "c"), ("coll", "b"))),
        {"a": (0, 1), "b": (0, 2), "c": (1, 2)},
    ),
    # Rank 0 is inside "a"; rank 1 would come, but waits for rank 2, which is held at "b".
    "a message behind a collective": (
        ((("coll", "a"),), (("recv", 2), ("coll", "a")), (("coll", "b"), ("send", 1))),
        {"a": (0, 1), "b": (2,)},
    ),
    "a master that takes any answer": (
        ((("recv", None), ("recv", None), ("coll", "w")), (("send", 0), ("coll", "w")), (("send", 0), ("coll", "w"))),
        {"w": (0, 1, 2)},
    ),
    "messages nobody has asked for yet": (
        ((("send", 1), ("send", 1), ("coll", "w")), (("coll", "w"), ("recv", 0), ("recv", 0))),
        {"w": (0, 1)},
    ),
}

_FREEING: dict[str, Any] = {
    # A target of "a" stays when nobody has "a" any more.
    "communicators that are used once": (
        ((("coll", "a"), ("free", "a"), ("coll", "b"), ("free", "b")),) * 2,
        {"a": (0, 1), "b": (0, 1)},
    ),
    # Rank 0 needs nobody for its second one, and has freed "a" when rank 1 is still to come.
    "a communicator that is freed by who is ahead": (
        (
            (("tell", "a"), ("tell", "a"), ("free", "a"), ("coll", "w")),
            (("tell", "a"), ("tell", "a"), ("coll", "w"), ("free", "a")),
        ),
        {"a": (0, 1), "w": (0, 1)},
    ),
    # Rank 0 has freed "a", which rank 1 keeps.
    "a communicator that one rank has freed": (
        ((("coll", "a"), ("free", "a")), (("coll", "a"), ("send", 0), ("free", "a"))),
        {"a": (0, 1)},
    ),
}

_NOBODY_WAITS_FOR: dict[str, Any] = {
    "a rank that computes while others stand in a collective": (
        ((("coll", "w"), ("spin", None), ("coll", "w")), (("coll", "w"), ("coll", "w"))),
        {"w": (0, 1)},
    ),
    "a rank that computes, and two communicators crossed": (
        (
            (("start", "a"), ("coll", "c"), ("wait", "a")),
            (("start", "c"), ("coll", "a"), ("wait", "c")),
            (("spin", None), ("coll", "c")),
        ),
        {"a": (0, 1), "c": (0, 1, 2)},
    ),
    "a rank that computes while another has told it something behind a collective": (
        ((("start", "w"), ("send", 1), ("wait", "w")), (("spin", None), ("recv", 0), ("coll", "w"))),
        {"w": (0, 1)},
    ),
    "a rank that computes while others stand in one of messages": (
        ((("small", "w"), ("coll", "a")), (("small", "w"), ("coll", "a")), (("spin", None), ("small", "w"))),
        {"w": (0, 1, 2), "a": (0, 1)},
    ),
}
"""What is left of a rank's program begins with a computation that no round sees the end of."""

_STARTED: dict[str, Any] = {
    "collectives that are started, and end in any order": (
        (
            (("start", "w"), ("start", "a"), ("wait", "a"), ("wait", "w")),
            (("start", "w"), ("coll", "a"), ("wait", "w")),
        ),
        {"w": (0, 1), "a": (0, 1)},
    ),
    "one that tells behind one that is started": (
        ((("coll", "w"), ("start", "w"), ("tell", "w"), ("wait", "w")), (("coll", "w"), ("coll", "w"), ("tell", "w"))),
        {"w": (0, 1)},
    ),
    "a root that goes on": (
        ((("tell", "world"), ("coll", "world")), (("tell", "world"), ("coll", "world"))),
        {"world": (0, 1)},
    ),
    "one of messages between two of the network": (
        ((("coll", "w"), ("small", "w"), ("coll", "w")), (("coll", "w"), ("small", "w"), ("coll", "w"))),
        {"w": (0, 1)},
    ),
}

_ONE_WAY: dict[str, Any] = {
    # Rank 0 has told, and stands in "a"; rank 1 stands in "a" before it is told.
    "a root that is ahead in another communicator": (
        ((("tell", "w"), ("coll", "a")), (("coll", "a"), ("tell", "w"))),
        {"w": (0, 1), "a": (0, 1)},
    ),
    "a root that is two ahead": (
        ((("tell", "w"), ("tell", "w")), (("tell", "w"), ("tell", "w"))),
        {"w": (0, 1)},
    ),
    "one that cannot begin anew, and one behind it that can": (
        ((("large", "w"), ("coll", "w")), (("large", "w"), ("coll", "w"))),
        {"w": (0, 1)},
    ),
    "one that is started, and one behind it that cannot begin anew": (
        ((("start", "w"), ("large", "w"), ("wait", "w")), (("start", "w"), ("large", "w"), ("wait", "w"))),
        {"w": (0, 1)},
    ),
    "a group that is made while another is used": (
        ((("make", "a"), ("coll", "w")), (("make", "a"), ("coll", "w"))),
        {"a": (0, 1), "w": (0, 1)},
    ),
}
"""Of programs with a clock: what has to end, on whom the others do not wait."""

_GONE_THROUGH: dict[str, Any] = {
    "a root that has gone on, and a rank that computes": (
        (
            (("give", "w"), ("give", "w"), ("coll", "a")),
            (("give", "w"), ("coll", "a")),
            (("spin", None), ("give", "w")),
        ),
        {"w": (0, 1, 2), "a": (0, 1)},
    ),
    "a root that has freed what a rank that computes still has to enter": (
        (
            (("coll", "w"), ("give", "w"), ("free", "w")),
            (("coll", "w"), ("spin", None), ("give", "w")),
        ),
        {"w": (0, 1)},
    ),
    "one of the network behind one of a root": (
        ((("give", "w"), ("coll", "w"), ("give", "w")), (("spin", None), ("give", "w"), ("coll", "w"), ("give", "w"))),
        {"w": (0, 1)},
    ),
}
"""A rank has gone through what another has not entered."""

_LONG = {
    "a chain of communicators",
    "a root that has gone on, and a rank that computes",
    "a master that takes any answer",
    "collectives that are started, and end in any order",
    "a rank that computes, and two communicators crossed",
}


_LONG_GOING_ON = {
    "a message behind a collective",
    "messages nobody has asked for yet",
    "communicators that are used once",
    "one of messages between two of the network",
    "a rank that computes while others stand in one of messages",
}
"""Long, too: only the cut that stops is among the quick tests, and that after which ranks go on beside all others."""

_COSTLY = {
    "a message behind a collective",
    "messages nobody has asked for yet",
    "a communicator that is freed by who is ahead",
    "one that tells behind one that is started",
    "one that is started, and one behind it that cannot begin anew",
    "a root that is ahead in another communicator",
}
"""Seconds each: not among those that are tried by default."""

_COSTLY_WITHOUT_CLOCK = {
    "two collectives in a row",
    "communicators that are used once",
    "a communicator that one rank has freed",
    "a root that goes on",
    "a root that has freed what a rank that computes still has to enter",
    "one of messages between two of the network",
    "a rank that computes while others stand in one of messages",
}
"""Without a clock each has some 10,000 worlds and more, and is not tried by default either."""

_COSTLY_GOING_ON = {"two collectives in a row", "a root that goes on", "a root that is two ahead"}
"""By default only the cut that stops is tried."""

_MOST_WORLDS, _MOST_WORLDS_SLOW = 200_000, 6_000_000
"""More of them is a mistake in a script; three ranks have millions, which take ten minutes and some GiB."""


def _params(jobs: dict[str, Any]) -> list[Any]:
    """Name, and whether ranks stop at the cut."""
    return [
        pytest.param(
            name,
            stop,
            marks=[pytest.mark.long] if _is_long(name, stop) else [],
            id=f"{name}-{'stopping' if stop else 'going on'}",
        )
        for name in jobs
        for stop in (True, False)
        if _is_long(name, stop) or not _is_costly(name, stop) or so_many(1, quick=0)
    ]


def _is_long(name: str, stop: bool) -> bool:
    return name in _LONG or (name in _LONG_GOING_ON and not stop)


def _is_costly(name: str, stop: bool) -> bool:
    return name in _COSTLY or (name in _COSTLY_GOING_ON and not stop)


def _with_clock(jobs: dict[str, Any]) -> dict[str, Any]:
    """Those without collectives that are made of messages, which programs with a clock have not."""
    return {
        name: job
        for name, job in jobs.items()
        if not any(kind in ("small", "give") for script in job[0] for kind, _ in script)
    }


@pytest.mark.parametrize(("name", "stop"), _params(_JOBS))
def test_every_order_of_events_leads_to_a_consistent_cut(name: str, stop: bool) -> None:
    job = Job(*_JOBS[name])
    found = explore(job, stop=stop, most=_MOST_WORLDS_SLOW if name in _LONG else _MOST_WORLDS)
    _check(job, found)


@pytest.mark.parametrize(("name", "stop"), _params(_ONE_WAY))
def test_what_has_to_end_ends_on_all_members_before_the_cut(name: str, stop: bool) -> None:
    job = Job(*_ONE_WAY[name])
    found = explore(job, stop=stop, most=_MOST_WORLDS_SLOW if name in _LONG else _MOST_WORLDS)
    _check(job, found)
    for cut in found.cuts:
        for me, rank in enumerate(cut):
            assert all(job.can_begin_anew(me, *one) for one in rank.open)


@pytest.mark.parametrize(("name", "stop"), _params(_FREEING))
def test_communicators_that_are_freed_meanwhile_keep_no_rank_from_the_cut(name: str, stop: bool) -> None:
    job = Job(*_FREEING[name])
    found = explore(job, stop=stop)
    _check(job, found)


@pytest.mark.parametrize(("name", "stop"), _params(_with_clock(_STARTED)))
def test_collectives_that_are_started_or_made_of_messages_are_open_at_the_cut_or_whole(name: str, stop: bool) -> None:
    job = Job(*_STARTED[name])
    found = explore(job, stop=stop)
    _check(job, found)
    assert any(rank.open or rank.small for cut in found.cuts for rank in cut)


@pytest.mark.parametrize(("name", "stop"), _params(_with_clock(_NOBODY_WAITS_FOR)))
def test_a_cut_waits_for_no_rank_that_computes(name: str, stop: bool) -> None:
    job = Job(*_NOBODY_WAITS_FOR[name])
    found = explore(job, stop=stop)
    _check(job, found)
    assert any(rank.open or rank.small for cut in found.cuts for rank in cut)


def _without_clock(name: str) -> Job:
    """A job whose ranks have no clock, and end nothing that not all have entered: who only tells gives a message."""
    scripts, members = {**_JOBS, **_FREEING, **_STARTED, **_NOBODY_WAITS_FOR, **_GONE_THROUGH}[name]
    given = tuple(tuple(("give", what) if kind == "tell" else (kind, what) for kind, what in one) for one in scripts)
    return Job(given, members, has_clock=False)


_WITHOUT_CLOCK = [
    one
    for one in _params({**_JOBS, **_FREEING, **_STARTED, **_NOBODY_WAITS_FOR, **_GONE_THROUGH})
    if one.marks or one.values[0] not in _COSTLY_WITHOUT_CLOCK or so_many(1, quick=0)
]


@pytest.mark.parametrize(("name", "stop"), _WITHOUT_CLOCK)
def test_without_a_clock_a_cut_needs_no_program_at_all(name: str, stop: bool) -> None:
    job = _without_clock(name)
    found = explore(job, stop=stop, most=_MOST_WORLDS_SLOW if name in _LONG else _MOST_WORLDS)
    _check(job, found)
    if name in _NOBODY_WAITS_FOR or name in _GONE_THROUGH:
        assert any(rank.open or rank.small or rank.parts for cut in found.cuts for rank in cut)


def test_the_exploration_finds_what_may_end_on_a_rank_before_another_has_entered_it() -> None:
    script = (("tell", "world"), ("coll", "world"))
    job = Job((script, script), {"world": (0, 1)}, has_clock=False)
    with pytest.raises(AssertionError, match="on members of world are complete"):
        _check(job, explore(job, stop=True))


def test_the_exploration_finds_what_ends_on_one_member_when_ranks_hide_what_they_have_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Job._standings

    def hide(job: Job, rank: Rank, me: int) -> tuple[tuple[str, ClockProgress], ...]:
        return tuple((key, replace(standing, entered=0)) for key, standing in honest(job, rank, me))

    monkeypatch.setattr(Job, "_standings", hide)
    job = Job(((("coll", "w"), ("coll", "w")),) * 2, {"w": (0, 1)})
    with pytest.raises(AssertionError, match="on members of w are complete"):
        _check(job, explore(job, stop=True))


def _check(job: Job, found: Explored) -> None:
    assert not found.dead_ends, found.dead_ends[0]
    assert found.cuts
    expected = job.run_to_end(job.start)
    assert job.is_complete(expected), "the script itself is wrong"
    for cut in found.cuts:
        for key, members in job.members.items():
            complete = {tuple(one for one in cut[member].done if one[0] == key) for member in members}
            assert len(complete) == 1, f"on members of {key} are complete {complete}"
        for source, giver in enumerate(cut):
            for destination, taker in enumerate(cut):
                assert giver.sent[destination] == taker.received[source]
        ended = job.run_to_end(job.restart(cut))
        assert job.is_complete(ended)
        assert [sorted(rank.got) for rank in ended.ranks] == [sorted(rank.got) for rank in expected.ranks]
