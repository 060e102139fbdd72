"""Meetings: when they close, and what they decide."""

import json
from dataclasses import replace

import pytest

from remesh.elasticity.model.generation import (
    MAX_STALLS,
    Generation,
    GiveUp,
    MeetingRules,
    NodeInfo,
    Wait,
    WorkerReport,
    check_state_is_here,
    decide_generation,
    decide_step,
)
from remesh.elasticity.model.mesh_policy import make_template
from remesh.elasticity.model.outcome import Category

RULES = MeetingRules(min_nodes=1, max_nodes=2, last_call_s=5.0, join_timeout_s=60.0, absence_timeout_s=20.0)
NODES = {index: NodeInfo(index, f"node-{index}", "127.0.0.1", 1, 2) for index in range(3)}
TEMPLATE = make_template({"dp": -1, "tp": 2}).to_json()


def reports(index: int, step: int | None = None, slots: int = 2) -> tuple[WorkerReport, ...]:
    return tuple(WorkerReport(slot, 100 * index + slot, TEMPLATE, step) for slot in range(slots))


def first_generation() -> Generation:
    plan = decide_generation(None, NODES, {0: reports(0), 1: reports(1)}, {}, RULES, 0.0)
    assert isinstance(plan, Generation)
    return plan


def test_first_meeting_waits_for_more_nodes_until_the_last_call_is_over() -> None:
    here = {0: reports(0)}
    assert isinstance(decide_generation(None, NODES, here, {}, RULES, 4.9), Wait)
    plan = decide_generation(None, NODES, here, {}, RULES, 5.0)
    assert isinstance(plan, Generation)
    assert plan.axes == {"dp": 1, "tp": 2}


def test_ranks_of_a_node_are_neighbours() -> None:
    assert [member.node for member in first_generation().members] == [0, 0, 1, 1]


def test_meeting_waits_for_a_member_that_is_neither_here_nor_proved_dead() -> None:
    here = {0: reports(0, step=7)}
    decision = decide_generation(first_generation(), NODES, here, {}, RULES, 1.0)
    assert decision == Wait("members not here yet: node-1", (1,))


def test_proof_of_death_closes_the_meeting_and_is_told() -> None:
    plan = decide_generation(first_generation(), NODES, {0: reports(0, step=7)}, {1: "port refused"}, RULES, 0.1)
    assert isinstance(plan, Generation)
    assert (plan.number, plan.step) == (2, 7)
    assert plan.reason == "lost node-1 (port refused); 2 workers fit dp=1 x tp=2 (was dp=2 x tp=2)"


def newcomers_alone(known_step: int, step: int | None = None) -> tuple[Generation, dict[int, tuple[WorkerReport, ...]]]:
    """What node 2, which has just joined nodes 0 and 1, would decide without them."""
    last = replace(first_generation(), number=2, step=7, known_step=known_step)
    here = {2: reports(2, step=step)}
    plan = decide_generation(last, NODES, here, {0: "no heartbeat", 1: "no heartbeat"}, RULES, 0.1)
    assert isinstance(plan, Generation)
    return plan, here


def test_newcomers_wait_a_while_for_members_that_hold_the_state_and_are_only_silent() -> None:
    plan, here = newcomers_alone(known_step=7)
    assert (plan.step, plan.known_step) == (0, 7)
    wait = check_state_is_here(plan, here, {0: "node-0"}, RULES, 19.9)
    assert isinstance(wait, Wait) and wait.absent == (0,)
    assert wait.reason == "no worker here holds the state of step 7, and these may be alive with it: node-0"
    assert check_state_is_here(plan, here, {0: "node-0"}, RULES, 20.0) is None
    assert check_state_is_here(plan, here, {}, RULES, 0.1) is None  # both are proved to be gone


def test_holders_of_an_earlier_step_wait_for_those_of_the_newest_too() -> None:
    plan, here = newcomers_alone(known_step=7, step=5)
    assert isinstance(check_state_is_here(plan, here, {0: "node-0"}, RULES, 0.1), Wait)
    plan, here = newcomers_alone(known_step=7, step=7)
    assert check_state_is_here(plan, here, {0: "node-0"}, RULES, 0.1) is None


def test_survivors_come_before_newcomers_and_keep_their_order() -> None:
    here = {1: reports(1, step=7), 2: reports(2), 0: reports(0, step=7)}
    plan = decide_generation(first_generation(), NODES, here, {}, RULES, 0.1)
    assert isinstance(plan, Generation)
    assert [member.node for member in plan.members] == [0, 0, 1, 1, 2, 2]


def test_spare_takes_the_seat_of_the_dead_and_the_others_keep_theirs() -> None:
    """Four places and a spare; rank 1 dies. Nothing is reshaped: its seat is the spare's."""
    template = make_template({"dp": 4}).to_json()
    nodes = {index: NodeInfo(index, f"node-{index}", "127.0.0.1", 1, 1) for index in range(5)}
    here = {index: (WorkerReport(0, 100 + index, template, 3),) for index in range(5)}
    first = decide_generation(None, nodes, here, {}, replace(RULES, max_nodes=5), 0.0)
    assert isinstance(first, Generation) and [one.pid for one in first.standby] == [104]
    del here[1]
    plan = decide_generation(first, nodes, here, {1: "port refused"}, RULES, 0.0)
    assert isinstance(plan, Generation)
    assert [member.pid for member in plan.members] == [100, 104, 102, 103]
    assert plan.failures == {"node-1": 1}


def test_different_meshes_in_one_job_are_refused() -> None:
    other = tuple(WorkerReport(slot, slot + 1, make_template({"dp": -1}).to_json()) for slot in range(2))
    decision = decide_generation(None, NODES, {0: reports(0), 1: other}, {}, RULES, 0.0)
    assert isinstance(decision, GiveUp)
    assert "start the same script on every node" in decision.reason


@pytest.mark.parametrize("name", ["seed", "save_every", "snapshot_every", "checkpoint", "timeout_s"])
def test_options_that_differ_on_one_worker_are_refused_with_their_name_and_both_values(name: str) -> None:
    asked = dict.fromkeys(("seed", "save_every", "snapshot_every", "checkpoint", "timeout_s"), "1")
    one, other = (replace(report, options=asked) for report in reports(0))
    here = {0: (one, replace(other, options=asked | {name: "2"}))}
    decision = decide_generation(None, NODES, here, {}, RULES, 10.0)
    assert isinstance(decision, GiveUp) and decision.category is Category.INPUT
    assert f"{name} is 1 on worker 0 of node-0 and 2 on worker 1 of node-0" in decision.reason
    assert isinstance(decide_generation(None, NODES, {0: (one, one)}, {}, RULES, 10.0), Generation)


def test_members_that_lose_each_other_again_and_again_give_up() -> None:
    plan = first_generation()
    here = {0: reports(0, step=4), 1: reports(1, step=4)}
    for _ in range(MAX_STALLS):
        decision = decide_generation(plan, NODES, here, {}, RULES, 0.1)
        assert isinstance(decision, Generation)
        plan = decision
    decision = decide_generation(plan, NODES, here, {}, RULES, 0.1)
    assert isinstance(decision, GiveUp)
    assert "lost each other" in decision.reason


def test_nodes_that_come_one_after_another_with_the_same_process_ids_are_no_stall() -> None:
    """In containers every worker is process 7. At one step node after node dies and comes again under a new number."""
    nodes = {index: replace(NODES[0], index=index, name=f"node-{index}") for index in range(20)}
    worker = WorkerReport(0, 7, make_template({"dp": -1}).to_json(), step=4)
    plan = decide_generation(None, nodes, {0: (worker,), 1: (worker,)}, {}, RULES, 10.0)
    for index in range(2, 2 + 2 * MAX_STALLS):
        assert isinstance(plan, Generation)
        plan = decide_generation(plan, nodes, {0: (worker,), index: (worker,)}, {index - 1: "gone"}, RULES, 0.1)
    assert isinstance(plan, Generation) and plan.num_stalls == 0


def test_a_vote_that_one_survivor_saw_holds_for_all() -> None:
    saw = WorkerReport(0, 1, TEMPLATE, step=6, taken=False)
    in_doubt = WorkerReport(1, 2, TEMPLATE, step=5, in_doubt=True)
    assert decide_step([in_doubt, saw]) == (6, False)


def test_a_vote_that_no_survivor_saw_came_to_nothing() -> None:
    in_doubt = WorkerReport(1, 2, TEMPLATE, step=5, in_doubt=True)
    assert decide_step([in_doubt, in_doubt]) == (5, True)


def test_generations_survive_json() -> None:
    plan = first_generation()
    assert Generation.from_json(json.loads(json.dumps(plan.to_json()))) == plan
