"""The store is lost: survivors move to another one, and a cut network never makes two jobs of one."""

import random

import pytest

from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.failover import (
    REFUSED,
    SILENT,
    Answer,
    Base,
    Join,
    LookAgain,
    Open,
    Place,
    Register,
    Return,
    Standby,
    decide_move,
    describe_missing_quorum,
)
from remesh.elasticity.model.generation import MeetingRules
from tests.profiles import seeds
from tests.unit.elasticity.cluster import FakeCluster

FIRST = Place()
THREE = [Base((0, 1, 2), FIRST)]
IDLE = Standby(None, frozenset())
TOO_FEW = "1 of 3 nodes that may be alive are here, more than half are needed"


def make_cluster(num_nodes: int, *, seed: int = 0, first_host: int | None = 0) -> FakeCluster:
    """Node 0 hosts the first store."""
    meeting = MeetingRules(1, num_nodes, last_call_s=1.0, join_timeout_s=5.0, absence_timeout_s=20.0)
    rules = AgentRules(2, 1, meeting, leave_timeout_s=10.0, exit_timeout_s=5.0)
    cluster = FakeCluster(rules, {"dp": -1}, last_step=12, rng=random.Random(seed), first_host=first_host)
    for _ in range(num_nodes):
        cluster.add_node()
    return cluster


def ends(cluster: FakeCluster) -> dict[int, bool]:
    return {at: one.finish.outcome.is_ok for at, one in cluster.agents.items() if one.finish is not None}


def test_survivors_move_to_the_lowest_of_them_and_go_on() -> None:
    cluster = make_cluster(3)
    cluster.run_until_step(5)
    cluster.kill_node(0)
    cluster.settle()
    assert ends(cluster) == {1: True, 2: True}
    last = cluster.generations()[-1]
    assert (last.place, last.step, last.axes) == (Place(1, 1), 5, {"dp": 4})
    assert cluster.num_steps == 12


def test_of_two_nodes_the_other_goes_on_when_the_host_is_proved_to_be_gone() -> None:
    cluster = make_cluster(2)
    cluster.run_until_step(5)
    cluster.kill_node(0)
    cluster.settle()
    assert ends(cluster) == {1: True}
    assert cluster.num_steps == 12


def test_of_two_nodes_the_other_stops_when_the_host_only_fell_silent() -> None:
    cluster = make_cluster(2)
    cluster.run_until_step(5)
    cluster.kill_node(0, is_silent=True)
    cluster.settle()
    assert cluster.num_steps == 5


def test_store_on_no_node_is_lost_and_the_job_goes_on_without_a_pause() -> None:
    cluster = make_cluster(3, first_host=None)
    cluster.run_until_step(5)
    cluster.cut({0: 1, 1: 1, 2: 1})
    cluster.settle()
    assert ends(cluster) == {0: True, 1: True, 2: True}
    assert [plan.number for plan in cluster.generations()] == [1]


def test_members_who_hear_of_their_plan_in_two_stores_meet_again() -> None:
    """Some adopt it where it was decided, the others where they have moved since, and their workers wait apart."""
    cluster = make_cluster(2, first_host=None)
    for _ in range(200):
        for index in cluster.agents:
            cluster.call_in(index)
            cluster.look(index)
            cluster.tick(index, 0.1)
        if any(agent.machine.generation is not None for agent in cluster.agents.values()):
            break
    ahead, behind = sorted(cluster.agents.values(), key=lambda agent: agent.machine.generation is None)
    assert ahead.machine.generation is not None and behind.machine.generation is None
    behind.reader.read(behind.store, behind.machine.wants)  # what it has read it may still lose, in the next request
    cluster.cut({0: 1, 1: 1})
    cluster.settle()
    assert ends(cluster) == {0: True, 1: True} and cluster.num_steps == 12
    first, second = cluster.generations()
    assert (first.place, second.place, second.step) == (FIRST, Place(1, 0), 0)


def test_losses_of_one_host_after_another_are_survived() -> None:
    cluster = make_cluster(4)
    for index in range(3):
        cluster.run_until_step(3 * index + 2)
        cluster.kill_node(index)
    cluster.settle()
    assert ends(cluster) == {3: True}
    assert [plan.place for plan in cluster.generations()] == [FIRST, Place(1, 1), Place(2, 2), Place(3, 3)]


def test_newcomer_joins_where_the_job_has_moved() -> None:
    cluster = make_cluster(3)
    cluster.run_until_step(3)
    cluster.kill_node(0)
    cluster.run_until_step(5)
    cluster.add_node()
    cluster.settle()
    assert ends(cluster) == {1: True, 2: True, 3: True}
    assert "node-3 joined" in cluster.generations()[-1].reason


def test_host_that_was_cut_off_stops_and_rejoins_when_the_network_is_back() -> None:
    cluster = make_cluster(3)
    cluster.run_until_step(3)
    cluster.cut({0: 1})
    cluster.run_until_step(5)
    assert cluster.generations()[-1].axes == {"dp": 4}
    cluster.cut({})
    cluster.settle()
    assert ends(cluster) == {0: True, 1: True, 2: True}
    assert [plan.axes["dp"] for plan in cluster.generations()] == [6, 4, 6]


def test_half_that_keeps_the_store_goes_on_and_the_other_half_does_not() -> None:
    cluster = make_cluster(4)
    cluster.run_until_step(3)
    cluster.cut({2: 1, 3: 1})
    cluster.settle()
    assert ends(cluster)[0] and ends(cluster)[1]
    assert cluster.generations()[-1].place == FIRST and cluster.num_steps == 12


@pytest.mark.parametrize("block", seeds(8, quick=3))
def test_no_story_of_cuts_and_lost_hosts_makes_two_jobs(block: int) -> None:
    """FakeCluster asserts at every step that whoever takes it is the only job there is."""
    for seed in range(block * 20, block * 20 + 20):
        tell_story(seed)


@pytest.mark.long
def test_no_story_of_thousands_makes_two_jobs() -> None:
    for seed in range(160, 3000):
        tell_story(seed)


def tell_story(seed: int) -> None:
    rng = random.Random(seed)
    cluster = make_cluster(rng.randrange(2, 6), seed=seed, first_host=rng.choice([0, 0, None]))
    for _ in range(rng.randrange(4, 80)):
        happen(cluster, rng)
    cluster.cut({})
    cluster.settle(400)
    story = f"seed {seed}: {[(plan.number, plan.place, plan.step, plan.reason) for plan in cluster.generations()]}"
    steps = [plan.step for plan in cluster.generations()]
    reasons = [plan.reason for plan in cluster.generations()]
    assert steps == sorted(steps) or any("no survivor holds" in one for one in reasons), story


def happen(cluster: FakeCluster, rng: random.Random) -> None:
    alive = [index for index, agent in cluster.agents.items() if agent.alive]
    if not alive:
        return
    index, what = rng.choice(alive), rng.random()
    if what < 0.3:
        cluster.look(index)
    elif what < 0.45:
        cluster.tick(index, rng.random() * 0.2)
    elif what < 0.55:
        cluster.call_in(index)
    elif what < 0.65:
        cluster.train()
    elif what < 0.82:
        cluster.settle(rng.randrange(1, 3))
    elif what < 0.87:
        cluster.cut({node: rng.randrange(2) for node in cluster.agents})
    elif what < 0.9:
        cluster.cut({})
    elif what < 0.92 and len(alive) > 1:
        cluster.kill_node(index, is_silent=rng.random() < 0.3)
    elif what < 0.95:
        cluster.kill_worker_while_voting(index, rng.randrange(2))
    elif what < 0.97:
        cluster.kill_worker(index, rng.randrange(2))
    elif len(cluster.agents) < 7:
        cluster.add_node()


# --- the rules by themselves ---


def test_two_sides_never_both_have_enough() -> None:
    """All divisions of up to six nodes, of whom some are gone and known to be so to one side, the other, or both."""
    for size in range(1, 7):
        bases = [Base(tuple(range(size)), FIRST)]
        for code in range(4**size):
            where = [code >> 2 * node & 3 for node in range(size)]
            # 0: old side, 1: new side, 2: gone, and the old side knows, 3: gone, and the new side knows
            old, new = ([node for node in range(size) if where[node] == side] for side in (0, 1))
            old_gone, new_gone = ([node for node in range(size) if where[node] == side] for side in (2, 3))
            old_may = old and describe_missing_quorum(bases, old, old_gone, FIRST) is None
            new_may = new and describe_missing_quorum(bases, new, new_gone, None) is None
            assert not (old_may and new_may), where


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({0: SILENT, 1: IDLE, 2: IDLE}, Register(1)),
        ({0: SILENT, 1: Standby(None, frozenset({2})), 2: IDLE}, LookAgain(TOO_FEW)),
        ({0: SILENT, 1: Standby(None, frozenset({1, 2})), 2: IDLE}, Open(Place(1, 1))),
        ({0: REFUSED, 1: REFUSED, 2: Standby(None, frozenset({2}))}, Open(Place(1, 2))),
        ({0: REFUSED, 1: Standby(Place(1, 1), frozenset()), 2: IDLE}, Join(Place(1, 1))),
        ({0: SILENT, 1: SILENT, 2: SILENT}, LookAgain("no agent answers")),
    ],
)  # fmt: skip
def test_agent_without_a_store_looks_around(answers: dict[int, Answer], expected: object) -> None:
    assert decide_move(2, FIRST, THREE, old_answers=False, answers=answers) == expected


def test_agent_returns_to_a_store_that_answers_again() -> None:
    assert decide_move(2, FIRST, THREE, old_answers=True, answers={1: Standby(Place(1, 1), frozenset())}) == Return()
