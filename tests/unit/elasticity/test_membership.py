"""The membership protocol over thousands of failure stories; each test opens with the situation it stands for."""

import itertools
import random

import pytest

from remesh.elasticity.membership.instructions import (
    Finish,
    KillWorker,
    LeaveAsked,
    Publish,
    StartWorker,
    Tell,
    Tick,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerSuspects,
)
from remesh.elasticity.membership.membership_machine import REPLACE_GRACE_S, AgentMachine, Phase
from remesh.elasticity.membership.phase_state import HURRY_FOR_S, STAY_POLL_S, WAKE_NODES, PhaseState
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.generation import MeetingRules, WorkerReport
from remesh.elasticity.model.mesh_policy import make_template
from remesh.foundation.exit_codes import ExitCode
from tests.profiles import seeds
from tests.unit.elasticity.cluster import FakeCluster


def make_cluster(
    *, num_nodes: int, num_slots: int = 2, min_nodes: int = 1, max_restarts: int = 0, seed: int = 0, tp: int = 1
) -> FakeCluster:
    meeting = MeetingRules(min_nodes, num_nodes, last_call_s=1.0, join_timeout_s=5.0, absence_timeout_s=20.0)
    rules = AgentRules(num_slots, max_restarts, meeting, leave_timeout_s=10.0, exit_timeout_s=5.0)
    cluster = FakeCluster(rules, {"dp": -1, "tp": tp}, last_step=12, rng=random.Random(seed))
    for _ in range(num_nodes):
        cluster.add_node()
    return cluster


def ends(cluster: FakeCluster) -> list[bool]:
    return [agent.finish.outcome.is_ok for agent in cluster.agents.values() if agent.finish is not None]


def codes(cluster: FakeCluster) -> list[int]:
    return [agent.finish.outcome.exit_code for agent in cluster.agents.values() if agent.finish is not None]


def test_two_nodes_meet_train_and_end_together() -> None:
    cluster = make_cluster(num_nodes=2)
    cluster.settle()
    assert [plan.axes for plan in cluster.generations()] == [{"dp": 4, "tp": 1}]
    assert ends(cluster) == [True, True]
    assert cluster.num_steps == 12


def test_node_lost_to_sigkill_leaves_the_other_node_with_the_same_workers() -> None:
    cluster = make_cluster(num_nodes=2, tp=2)
    cluster.run_until_step(5)
    before = {worker.pid for worker in cluster.agents[0].workers.values()}
    cluster.kill_node(1)
    cluster.settle()
    first, second = cluster.generations()
    assert (first.axes, second.axes) == ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 2})
    assert {member.pid for member in second.members} == before
    assert second.step == 5
    assert "lost node-1" in second.reason
    assert ends(cluster) == [True]


def test_node_that_comes_back_makes_the_mesh_grow_at_a_step_boundary() -> None:
    cluster = make_cluster(num_nodes=2, tp=2)
    cluster.run_until_step(3)
    cluster.kill_node(1)
    cluster.run_until_step(6)
    cluster.add_node()
    cluster.settle()
    plans = cluster.generations()
    assert [plan.axes["dp"] for plan in plans] == [2, 1, 2]
    assert "node-2 joined" in plans[-1].reason
    assert ends(cluster) == [True, True]


@pytest.mark.parametrize("num_nodes", [3, WAKE_NODES, WAKE_NODES + 1])
def test_whoever_sees_a_loss_first_wakes_the_others_unless_they_are_many(num_nodes: int) -> None:
    cluster = make_cluster(num_nodes=num_nodes)
    cluster.run_until_step(3)
    assert not cluster.woken
    cluster.kill_worker(1, 0)
    cluster.settle()
    wakes = dict(reversed(cluster.woken))
    if num_nodes > WAKE_NODES:
        assert not wakes
    else:
        assert wakes[1] == tuple(index for index in range(num_nodes) if index != 1)


def test_killed_worker_is_replaced_while_restarts_remain() -> None:
    cluster = make_cluster(num_nodes=1, num_slots=3, max_restarts=1)
    cluster.run_until_step(3)
    cluster.kill_worker(0, 1)
    cluster.settle()
    assert [plan.axes["dp"] for plan in cluster.generations()][-1] == 3
    assert ends(cluster) == [True]


def test_a_job_whose_holders_are_all_gone_knows_how_far_it_was() -> None:
    """Its workers die one after the other, and new ones come: they hold nothing, and must not begin as if it were new.

    Nothing else tells: the generation that was lost had begun at step 0.
    """
    cluster = make_cluster(num_nodes=1, max_restarts=2)
    cluster.run_until_step(4)
    cluster.kill_worker(0, 0)
    cluster.kill_worker(0, 1)
    cluster.settle()
    first, second = cluster.generations()
    assert (first.step, first.known_step) == (0, 0)
    assert (second.step, second.known_step) == (0, 4)
    assert "no survivor holds state" in second.reason


def test_last_worker_of_a_node_gone_ends_that_node_only() -> None:
    cluster = make_cluster(num_nodes=2, num_slots=1)
    cluster.run_until_step(3)
    cluster.kill_worker(1, 0)
    cluster.settle()
    assert sorted(ends(cluster)) == [False, True]
    assert cluster.generations()[-1].axes == {"dp": 1, "tp": 1}


def test_preempted_node_leaves_after_a_step_and_ends_well() -> None:
    cluster = make_cluster(num_nodes=2, tp=2)
    cluster.run_until_step(5)
    cluster.preempt_node(1)
    cluster.settle()
    second = cluster.generations()[1]
    assert second.axes == {"dp": 1, "tp": 2}
    assert second.step >= 5
    assert "node-1 left" in second.reason
    assert codes(cluster) == [ExitCode.OK, ExitCode.LEFT]


def test_a_worker_that_ends_while_its_node_leaves_is_not_started_again_and_its_state_counts_as_lost() -> None:
    """SIGTERM goes to all processes of the node: its worker is gone before the next step."""
    cluster = make_cluster(num_nodes=2, num_slots=1, max_restarts=3)
    cluster.run_until_step(5)
    cluster.preempt_node(1)
    cluster.kill_worker(1, 0)
    cluster.settle()
    assert not cluster.agents[1].workers and cluster.agents[1].machine.restarts_left == 3
    assert codes(cluster) == [ExitCode.OK, ExitCode.LEFT_WITHOUT_STATE]
    left = cluster.agents[1].finish
    assert left is not None and "what its workers 0 held was not handed over" in left.outcome.text


def test_a_lone_node_that_leaves_with_state_that_nobody_else_has_says_so() -> None:
    """No folder for checkpoints, so its worker is out and has handed nothing over."""
    machine = make_machine()
    template = make_template({"dp": -1}).to_json()
    machine.handle(WorkerReady(WorkerReport(0, 100, template, step=7)), 0.1)
    machine.handle(LeaveAsked("SIGTERM"), 0.2)
    (finish,) = machine.handle(WorkerExited(0, 0), 0.3)
    assert isinstance(finish, Finish) and finish.outcome.exit_code == ExitCode.LEFT_WITHOUT_STATE


def test_too_few_workers_for_the_mesh_end_the_job_with_both_numbers() -> None:
    cluster = make_cluster(num_nodes=1, num_slots=3, tp=4)
    cluster.settle()
    finish = cluster.agents[0].finish
    assert finish is not None
    assert not finish.outcome.is_ok
    assert "needs at least 4 workers, 3 are alive" in finish.outcome.text


def test_workers_in_doubt_follow_a_survivor_that_saw_the_vote() -> None:
    for seed in range(40):
        cluster = make_cluster(num_nodes=2, seed=seed)
        cluster.run_until_step(5)
        cluster.kill_worker_while_voting(1, 0)
        cluster.settle()
        # 6 if any survivor saw the outcome, 5 if none did; FakeCluster asserts that all stand at the same step.
        assert cluster.generations()[1].step in (5, 6)
        assert ends(cluster) == [True, True]


@pytest.mark.parametrize("block", seeds(10, quick=3))
def test_any_story_of_deaths_and_joins_ends_well_with_all_ranks_at_the_same_steps(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        cluster = make_cluster(num_nodes=3, max_restarts=2, seed=seed)
        rng = random.Random(seed)
        for _ in range(rng.randrange(4, 60)):
            happen(cluster, rng)
        for index in cluster.agents:
            cluster.thaw_node(index)
        cluster.settle(800)
        story = f"seed {seed}: {[(plan.number, plan.axes, plan.step, plan.reason) for plan in cluster.generations()]}"
        finished = [agent.finish for agent in cluster.agents.values() if agent.finish is not None]
        assert not any(agent.alive for agent in cluster.agents.values()), f"somebody never finished; {story}"
        failed = {finish.outcome.text for finish in finished if not finish.outcome.is_ok}
        assert all("no worker and no restart left" in text for text in failed), f"{failed}; {story}"
        plans = cluster.generations()
        for before, after in itertools.pairwise(plans):
            assert after.step >= before.step or "no survivor holds state" in after.reason, f"a step was lost; {story}"


def happen(cluster: FakeCluster, rng: random.Random) -> None:
    """One random thing; at least one node with a living worker is always left."""
    alive = [index for index, agent in cluster.agents.items() if agent.alive]
    if not alive:
        return
    index = rng.choice(alive)
    what = rng.random()
    if what < 0.25:
        cluster.look(index)
    elif what < 0.45:
        cluster.tick(index, rng.random() * 0.2)
    elif what < 0.58:
        cluster.call_in(index)
    elif what < 0.6 and cluster.generations():
        cluster.find_straggler(index, rng.randrange(2), 1 + 3 * rng.random())
    elif what < 0.85:
        cluster.settle(rng.randrange(1, 3))
    elif what < 0.88 and len(alive) > 1:
        cluster.kill_node(index)
    elif what < 0.9 and _others_hold_state(cluster, index):
        cluster.preempt_node(index)
    elif what < 0.94 and _others_hold_state(cluster, index):
        cluster.kill_worker_while_voting(index, rng.randrange(2))
    elif what < 0.96 and _others_hold_state(cluster, index):
        cluster.kill_worker(index, rng.randrange(2))
    elif what < 0.975 and _others_hold_state(cluster, index):
        cluster.freeze_node(index)
    elif what < 0.985:
        cluster.thaw_node(index)
    elif len(alive) < 5 and cluster.agents[alive[0]].machine.phase is not Phase.ENDING:
        cluster.add_node()


def _others_hold_state(cluster: FakeCluster, index: int) -> bool:
    return any(
        agent.alive and not agent.frozen and agent.workers for at, agent in cluster.agents.items() if at != index
    )


def test_node_that_froze_and_was_given_up_comes_back_without_its_old_state() -> None:
    """A node stands still for longer than its heartbeat may; the others go on; it wakes up and wants in again."""
    cluster = make_cluster(num_nodes=2)
    cluster.run_until_step(3)
    cluster.freeze_node(1)
    cluster.run_until_step(6)
    cluster.thaw_node(1)
    cluster.settle()
    plans = cluster.generations()
    assert [plan.axes["dp"] for plan in plans] == [4, 2, 4]
    assert "node-1 joined" in plans[-1].reason
    assert ends(cluster) == [True, True]


def test_leader_of_a_meeting_may_die_or_freeze_in_it() -> None:
    """Whoever leads the meeting is lost before it has proposed; somebody else leads."""
    for lose in (FakeCluster.kill_node, FakeCluster.freeze_node):
        cluster = make_cluster(num_nodes=3)
        cluster.run_until_step(3)
        cluster.kill_node(2)
        for index in (0, 1):
            cluster.look(index)
        leader = int(cluster.first.keys["gen/2/lead/0"]["node"])
        lose(cluster, leader)
        cluster.run_until_step(6)
        cluster.settle()
        assert {"node": 1 - leader} in (cluster.first.get("gen/2/lead/1"), cluster.first.get("gen/3/lead/0"))
        assert ends(cluster)[0]


def test_slow_worker_whose_state_nobody_else_holds_keeps_its_seat_and_is_not_asked_again() -> None:
    """It finds in the vote that the job would lose steps without it."""
    cluster = make_cluster(num_nodes=2)
    cluster.run_until_step(3)
    for _ in range(2):
        cluster.find_straggler(1, 0, 9.0)
        cluster.agents[1].workers[0].is_leaving = False
        cluster.run_until_step(cluster.num_steps + 3)
    assert [plan.axes["dp"] for plan in cluster.generations()] == [4, 4]
    kept = [note.values["reason"] for note in cluster.notes if note.kind == "straggler-kept"]
    assert kept == ["worker 0 of node-1 keeps its rank: the job would lose steps without what it holds"]


def make_machine() -> AgentMachine:
    """An agent with one worker, which has been started at second 0."""
    meeting = MeetingRules(1, 1, last_call_s=1.0, join_timeout_s=5.0, absence_timeout_s=20.0)
    machine = AgentMachine(0, "a", AgentRules(1, 3, meeting, leave_timeout_s=10.0, exit_timeout_s=5.0))
    assert machine.start(0.0) == [StartWorker(0)]
    return machine


@pytest.mark.parametrize("code", [0, 1, 3])
def test_script_that_raises_or_exits_at_once_ends_the_job_and_uses_no_restart(code: int) -> None:
    """Before it called remesh.elastic, and after: with any exit code, for a job that goes on alone would be no job."""
    report = WorkerReport(0, 100, make_template({"dp": -1}).to_json())
    hint = ", or give --mode restart for a script that torchrun starts"
    for called_in, told, ending in (
        (False, "ended before it called remesh.elastic", hint),
        (True, "raised or exited", ""),
    ):
        machine = make_machine()
        if called_in:
            machine.handle(WorkerReady(report), 0.1)
        (end,) = machine.handle(WorkerExited(0, code), 0.2)
        assert isinstance(end, Publish) and end.key == "end"
        assert end.value["text"] == f"worker 0 of a {told} (exit code {code}); see its log{ending}"
        assert end.value["category"] == "worker"


def test_an_error_of_any_length_is_told_in_few_words() -> None:
    """A store refuses long values, and an agent takes that for its loss: it moved and told the same again, for ever."""
    machine = make_machine()
    machine.handle(WorkerReady(WorkerReport(0, 100, make_template({"dp": -1}).to_json())), 0.1)
    (end,) = machine.handle(WorkerFailed(0, "ValueError: " + "h" * 20_000_000), 0.2)
    assert isinstance(end, Publish) and end.key == "end"
    assert end.value["text"].startswith("worker 0 of a failed: ValueError: hh") and len(end.value["text"]) < 5000
    cluster = make_cluster(num_nodes=2)
    cluster.run_until_step(3)
    plan, store = cluster.generations()[-1], cluster.first
    cluster._feed(0, WorkerSuspects(0, plan.number, "h" * 20_000_000))
    assert len(store.keys[f"gen/{plan.number}/broken"]["text"]) < 5000


def test_worker_that_does_not_end_when_told_is_killed_and_the_agent_ends() -> None:
    """It ignores every signal that can be ignored, and every message."""
    machine = make_machine()
    told = machine.handle(LeaveAsked("SIGTERM"), 1.0)
    assert [one.message["type"] for one in told if isinstance(one, Tell)] == ["exit"]
    assert machine.handle(Tick(), 5.9) == []
    assert machine.handle(Tick(), 6.1) == [KillWorker(0, "did not end as asked")]
    assert machine.handle(Tick(), 7.0) == []
    (finish,) = machine.handle(WorkerExited(0, -9), 7.1)
    assert isinstance(finish, Finish) and finish.outcome.is_ok


def test_a_dead_worker_is_replaced_a_moment_later_while_others_of_its_node_go_on() -> None:
    """Two workers of one node: the first death leaves somebody who needs the processor now, the second nobody."""
    meeting = MeetingRules(1, 1, last_call_s=1.0, join_timeout_s=5.0, absence_timeout_s=20.0)
    machine = AgentMachine(0, "a", AgentRules(2, 3, meeting, leave_timeout_s=10.0, exit_timeout_s=5.0))
    assert machine.start(0.0) == [StartWorker(0), StartWorker(1)]
    first = [one for one in machine.handle(WorkerExited(0, -9), 1.0) if isinstance(one, StartWorker)]
    assert first == [StartWorker(0, REPLACE_GRACE_S)]
    alone = make_machine()
    assert StartWorker(0, 0.0) in alone.handle(WorkerExited(0, -9), 1.0)


@pytest.mark.parametrize(("num_nodes", "expected_s"), [(0, 0.001), (50, 0.0055), (100, 0.01), (4096, 0.01)])
def test_agents_hurry_for_a_moment_while_a_plan_is_wanted_unless_there_are_many(
    num_nodes: int, expected_s: float
) -> None:
    stay = PhaseState(Phase.MEETING, since_s=10.0)
    assert stay.look_again_s(10.1, num_nodes) == pytest.approx(expected_s)
    assert stay.look_again_s(10.0 + 1.01 * HURRY_FOR_S, num_nodes) == STAY_POLL_S
    assert PhaseState(Phase.RUNNING, since_s=10.0).look_again_s(10.1, num_nodes) == STAY_POLL_S
