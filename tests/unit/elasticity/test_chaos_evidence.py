"""What the soak calls whole, and what it does not; its stories follow from their seeds."""

from __future__ import annotations

from typing import Any

from remesh.elasticity.training.position import Position, plan_batch
from tests.procs.chaos.evidence import find_faults, trace_line
from tests.procs.chaos.story import NETWORK, Kind, tell_story

STREAM = {"num_samples": 10, "batch_size": 4, "seed": 1}
LOSSES = [1.0, 0.9, 0.8, 0.7]


def taken(generation: int, step: int, loss: float | None = None) -> list[dict[str, Any]]:
    """What two ranks log that share the batch of a step."""
    position = Position(step - 1, 4 * (step - 1))
    batch = plan_batch(position, num_samples=10, batch_size=4, seed=1, num_epochs=None)
    told = [
        {"kind": "batch", "generation": generation, "step": step - 1, "share": share, "samples": list(part)}
        for share, part in ((0, batch[:2]), (1, batch[2:]))
    ]
    value = LOSSES[step - 1] if loss is None else loss
    return [*told, {"kind": "step", "generation": generation, "step": step, "loss": value}]


def judge(*lives: list[dict[str, Any]]) -> list[str]:
    return find_faults(trace_line(lives), LOSSES, tolerance=1e-9, stream=STREAM)


def test_a_calm_job_is_whole() -> None:
    assert judge([event for step in (1, 2, 3, 4) for event in taken(1, step)]) == []


def test_steps_gone_back_over_count_once() -> None:
    events = [*taken(1, 1), *taken(1, 2), *taken(1, 3), *taken(2, 2), *taken(2, 3), *taken(2, 4)]
    assert judge(events) == []
    assert trace_line([events]).num_repeated == 2


def test_a_job_that_was_started_again_goes_on_from_its_checkpoint() -> None:
    assert judge([*taken(1, 1), *taken(1, 2)], [*taken(1, 2), *taken(1, 3)]) == []


def test_a_step_left_out_is_told() -> None:
    assert judge([*taken(1, 1), *taken(1, 3)]) == ["step 2 was never taken"]


def test_a_share_lost_and_a_share_twice_are_told() -> None:
    lost = [event for event in taken(1, 1) if event.get("share") != 1]
    twice = [*taken(1, 1), {**taken(1, 1)[0], "share": 2}]
    assert [text.partition(":")[0] for text in (*judge(lost), *judge(twice))] == ["step 1", "step 1"]


def test_a_loss_off_the_undisturbed_one_is_told() -> None:
    assert judge(taken(1, 1, loss=1.001)) == ["step 1: loss 1.001, undisturbed 1.0"]


def test_a_story_follows_from_its_seed_and_may_be_told_from_any_fault_on() -> None:
    shape = {"num_nodes": 2, "num_slots": 2}
    long = tell_story(5, 400, **shape, kinds=frozenset(Kind))
    assert tell_story(5, 20, **shape, kinds=frozenset(Kind)) == long[:20]
    assert {fault.kind for fault in long} == set(Kind)
    assert {fault.kind for fault in tell_story(5, 400, **shape, kinds=frozenset(Kind) - NETWORK)} == set(Kind) - NETWORK
