"""Nodes that fail again and again hold off longer and longer."""

import random

from remesh.elasticity.membership.exclusion import ExclusionRules, decide_hold_off
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.generation import MeetingRules
from tests.unit.elasticity.cluster import FakeCluster


def make_cluster(rules: ExclusionRules) -> FakeCluster:
    meeting = MeetingRules(1, 2, last_call_s=1.0, join_timeout_s=5.0, absence_timeout_s=20.0)
    agent = AgentRules(2, 9, meeting, leave_timeout_s=10.0, exit_timeout_s=5.0, exclusion=rules)
    cluster = FakeCluster(agent, {"dp": -1}, last_step=400, rng=random.Random(0))
    for _ in range(2):
        cluster.add_node()
    return cluster


def kill_worker(cluster: FakeCluster, index: int) -> None:
    """The others meet again before the worker that takes its place is up."""
    cluster.kill_worker(index, 0)
    for _ in range(4):
        for one in cluster.agents:
            cluster.look(one)
            cluster.tick(one, 0.01)


def rounds_until_whole(cluster: FakeCluster) -> int:
    """Rounds of 0.2 s until all four workers train."""
    for count in range(200):
        if cluster.generations() and cluster.generations()[-1].axes == {"dp": 4}:
            return count
        cluster.settle(1)
    raise AssertionError("the mesh never was whole again")


def test_delay_grows_and_is_bounded() -> None:
    rules = ExclusionRules(free=2, first_delay_s=10.0, max_delay_s=60.0)
    told = [decide_hold_off("a", count, rules) for count in range(8)]
    assert [None if one is None else one.seconds for one in told] == [None, None, None, 10, 20, 40, 60, 60]
    assert told[3] is not None and told[3].reason == "a failed 3 times, 2 are free: it holds off 10 s"


def test_node_that_loses_its_worker_again_and_again_gets_it_back_later_and_later() -> None:
    cluster = make_cluster(ExclusionRules(free=1, first_delay_s=2.0))
    rounds = []
    for _ in range(4):
        rounds_until_whole(cluster)
        kill_worker(cluster, 1)
        rounds.append(rounds_until_whole(cluster))
    assert rounds[0] < rounds[1] < rounds[2] < rounds[3], rounds
    assert cluster.generations()[-1].failures == {"node-1": 4}


def test_node_that_holds_off_is_let_in_when_the_job_cannot_go_on_without_it() -> None:
    cluster = make_cluster(ExclusionRules(free=1, first_delay_s=1000.0))
    for _ in range(2):
        rounds_until_whole(cluster)
        kill_worker(cluster, 1)
        cluster.settle(3)
    assert cluster.generations()[-1].axes == {"dp": 3}
    cluster.kill_node(0)
    cluster.settle(3)
    assert cluster.generations()[-1].axes == {"dp": 2}


def test_nobody_holds_off_unless_asked() -> None:
    assert decide_hold_off("a", 100, ExclusionRules()) is None
