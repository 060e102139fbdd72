"""Where a worker stands in its step: events in, instructions out."""

import random

import pytest

from remesh.elasticity.training.step_machine import _TABLE, Instruction, StepEvent, StepMachine, StepPhase
from remesh.foundation.errors import ConfigError

PERFORM = {
    StepEvent.CARRIED: lambda step: step.carried({"optim"}),
    StepEvent.CALLED: lambda step: step.called(),
    StepEvent.HANDED_OUT: lambda step: step.handed_out(),
    StepEvent.TAKEN: lambda step: step.voted(True),
    StepEvent.VOTED_DOWN: lambda step: step.voted(False),
    StepEvent.REJOINED: lambda step: step.rejoined(),
}


def at_commit(*optimizers: str) -> StepMachine:
    """In the first step, which all ranks take."""
    step = StepMachine()
    step.carried(optimizers)
    step.called()
    step.handed_out()
    step.voted(True)
    return step


def let_step(step: StepMachine, *optimizers: str) -> None:
    for one in optimizers:
        step.began(one)
        step.stepped(one)


def next_commit(step: StepMachine) -> None:
    step.called()
    step.handed_out()
    step.voted(True)


@pytest.mark.parametrize("seed", range(20))
def test_every_story_follows_the_table_and_what_is_not_in_it_is_refused(seed: int) -> None:
    chance, step = random.Random(seed), StepMachine()
    for _ in range(200):
        event = chance.choice([*StepEvent])
        expected = _TABLE.get((step.phase, event))
        if expected is None:
            before = step.phase
            with pytest.raises(ConfigError):
                PERFORM[event](step)
            assert step.phase is before
        else:
            PERFORM[event](step)
            assert step.phase is expected
        if step.phase in (StepPhase.BETWEEN, StepPhase.OPEN, StepPhase.DROPPED):
            assert step.is_whole
        if step.phase is StepPhase.EMPTY:
            assert not step.is_whole


def test_a_state_is_whole_from_the_optimizers_step_on() -> None:
    """An evaluation after the step loses a rank: the survivors have all of the step."""
    step = at_commit("optim")
    assert not step.is_whole, "the program has not come to it"
    step.began("optim")
    assert not step.is_whole, "some parameters have moved"
    step.stepped("optim")
    assert step.is_whole


def test_a_state_between_the_steps_of_two_optimizers_belongs_to_no_step() -> None:
    step = at_commit("one", "other")
    let_step(step, "one")
    assert not step.is_whole
    let_step(step, "other")
    assert step.is_whole


def test_an_optimizer_that_steps_at_every_third_commit_is_due_at_the_third() -> None:
    step = at_commit("each", "third")
    whole = []
    for commit in range(1, 10):
        let_step(step, "each")
        if commit % 3 == 0:
            before = step.is_whole
            let_step(step, "third")
            assert step.is_whole
            whole.append(before)
        else:
            whole.append(step.is_whole)
        next_commit(step)
    # Nothing is known of it before its first step.
    assert whole == [False, False, False, True, True, False, True, True, False]


def test_a_program_without_a_carried_optimizer_is_through_when_it_calls_the_job() -> None:
    step = at_commit()
    assert not step.is_whole
    step.called()
    assert step.is_whole


def test_a_batch_that_is_dropped_changes_nothing() -> None:
    step = StepMachine()
    step.carried({"optim"})
    step.handed_out()
    step.voted(False)
    assert step.is_whole and step.phase is StepPhase.DROPPED


def test_what_is_owed_is_done_in_order_once_and_leaving_last() -> None:
    step = StepMachine()
    step.carried({"optim"})
    step.handed_out()
    step.voted(True, {Instruction.LEAVE, Instruction.HAND_OVER, Instruction.COMPARE_GRADIENTS})
    assert step.called() == [*Instruction]
    assert step.called() == [Instruction.LEAVE], "who is to leave stays so"
    step.handed_out()
    step.voted(True, {Instruction.COMPARE_GRADIENTS})
    assert step.called() == [Instruction.KEEP_GRADIENTS], "compared once in a generation"
    step.rejoined()
    step.carried({"optim"})
    step.handed_out()
    step.voted(True)
    assert step.called() == [Instruction.KEEP_GRADIENTS, Instruction.COMPARE_STATE]
