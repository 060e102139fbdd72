"""Who is slow is not taken for dead, and an agent that was slow itself counts its looks, and not the seconds."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.elasticity.launch.flags import find_flag
from remesh.elasticity.model.failover import SILENT, Standby
from remesh.elasticity.model.generation import Generation, NodeInfo
from remesh.elasticity.model.rank_assignment import MeshMember
from remesh.elasticity.node.store_side import BEAT_INTERVAL_S, BEATS_LOST, Heartbeats
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.store.home import MOVE_TIMEOUT_S, SILENT_POLL_S, Address, MovingNode, StoreHome
from remesh.elasticity.store.store_servers import STORE_SILENCE_TIMEOUT_S, StoreWatch
from remesh.elasticity.training.place import JobOptions
from remesh.wire.token import Token


def a_home() -> StoreHome:
    card = JobCard("in-process", 1, 2, "x.py")
    address = Address("job", ("127.0.0.1:1",), False, "127.0.0.1", card, Token("job", b""), connect_timeout_s=1.0)
    return StoreHome(address, StoreWatch(), endpoint="127.0.0.1:1")


def test_a_rank_that_keeps_the_others_waiting_is_judged_before_their_collective_times_out() -> None:
    """By default one that evaluated for a minute was killed: the collective of the others ended after half of it."""
    options = JobOptions(checkpoint=None, save_every=None)
    assert options.timeout_s > float(find_flag("hang_timeout").default)


def test_a_node_whose_heartbeat_stands_still_at_every_look_is_dead() -> None:
    beats = Heartbeats()
    found = [beats.take(3, 7, BEAT_INTERVAL_S * look) for look in range(BEATS_LOST + 2)]
    assert [one is not None for one in found] == [False] * (BEATS_LOST + 1) + [True]
    assert found[-1] is not None and "no heartbeat for 5.5 s" in found[-1].proof


def test_a_machine_that_stood_still_as_a_whole_takes_no_node_for_dead() -> None:
    """All nodes of a job stop with their machine for a minute: the first to go on sees the others' old counts."""
    beats = Heartbeats()
    assert beats.take(3, 7, 10.0) is None and beats.take(3, 7, 10.5) is None
    assert beats.take(3, 7, 70.0) is None
    assert beats.take(3, 8, 70.5) is None


def test_an_answer_is_not_given_up_by_an_agent_that_stood_still_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, cuts = StoreWatch(), list[str]()
    with watch.over(STORE_SILENCE_TIMEOUT_S, lambda: cuts.append("cut")):
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 60)
        watch.look()
        assert not cuts
        for _ in range(100):
            watch.look()
        assert cuts


def test_a_node_that_answers_again_while_the_store_is_looked_for_is_not_told_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = a_home()
    members = (MeshMember(0, 0, 0, 0), MeshMember(1, 1, 0, 0))
    plan = Generation(1, {"dp": 2}, members, (), {0: "a", 1: "b"}, step=0, taken=True, reason="")
    me = MovingNode(0, plan, {index: NodeInfo(index, "ab"[index], "127.0.0.1", 1, 1, 1, 1) for index in (0, 1)})
    now_s, answers = 100.0, dict[str, Any](is_listening=None)
    monkeypatch.setattr("remesh.elasticity.store.home.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr("remesh.elasticity.store.home.is_listening", lambda *_: answers["is_listening"])
    monkeypatch.setattr(StoreHome, "_store_of", lambda *_: SimpleNamespace(get=lambda _key: None))
    assert home._ask(1, me) == SILENT and home.silent.keys() == {1}
    now_s, answers["is_listening"] = now_s + SILENT_POLL_S, True
    assert isinstance(home._ask(1, me), Standby)
    assert not home.silent


@pytest.mark.parametrize("answers", [[None, None, "client"], [None, None, None]])
def test_a_node_that_was_in_no_mesh_yet_waits_for_a_store_that_is_slow(
    monkeypatch: pytest.MonkeyPatch, answers: list[str | None]
) -> None:
    """It had ended at once, and its job with it, since the store stood still for seven seconds in the first meeting."""
    now_s, asked = [100.0], iter(answers)

    def sleep(_seconds: float) -> None:
        now_s[0] += MOVE_TIMEOUT_S / 3

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr("remesh.elasticity.store.home.time", clock)
    monkeypatch.setattr("remesh.elasticity.store.home.is_listening", lambda *_: None)
    monkeypatch.setattr(StoreHome, "_try_old", lambda _home: next(asked))
    monkeypatch.setattr(StoreHome, "_enter", lambda _home, client: client)
    assert a_home().move(MovingNode(0, None, {})) == answers[-1]


def test_a_node_that_was_in_no_mesh_yet_does_not_wait_for_a_store_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remesh.elasticity.store.home.is_listening", lambda *_: False)
    assert a_home().move(MovingNode(0, None, {})) is None


def test_a_host_that_is_far_away_is_given_longer_at_each_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()
    monkeypatch.setattr("remesh.elasticity.store.home.is_listening", lambda *given: limits.append(given[-1]))
    home = a_home()
    for _ in range(5):
        assert home._probe("far.example", 1) is None
    assert limits == [0.2, 0.4, 0.8, 1.0, 1.0]
