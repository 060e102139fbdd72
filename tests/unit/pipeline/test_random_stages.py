"""Pipelines of random stages have the gradients of one process, by every schedule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from remesh.pipeline.schedules import SCHEDULES
from tests.profiles import seeds
from tests.unit.pipeline.random_stages import RandomModel, batches_of, draw_model, train_alone, train_by

NUM_MICROBATCHES = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state_of(model: RandomModel) -> dict[str, torch.Tensor]:
    """Gradients, and buffers of which one counts how often a checkpointed module ran."""
    state = {}
    # For a value that a stage takes and does not use zeros come back, and go on, where one process does nothing.
    counts = all(stage.uses_all for stage in model.stages)
    for at, stage in enumerate(model.stages):
        for name, weight in stage.named_parameters():
            state[f"{at}.{name}"] = torch.zeros_like(weight) if weight.grad is None else weight.grad
        state[f"{at}.mean"] = stage.weights.mean
        if counts:
            state[f"{at}.num_calls"] = stage.weights.num_calls
            state[f"{at}.runs"] = torch.tensor(stage.weights.runs)
    return state


def check_seed(seed: int, schedule: str) -> None:
    num_stages = 2 + seed % 3
    alone, model = draw_model(seed, num_stages), draw_model(seed, num_stages)
    batches = batches_of(seed, NUM_MICROBATCHES)
    with warnings.catch_warnings():
        # Reentrant checkpointing of values without gradients says so, in one process and here.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        losses = train_alone(alone, batches)
        found = train_by(SCHEDULES[schedule](num_stages, NUM_MICROBATCHES), model, batches)
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    expected = state_of(alone)
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-13, msg=f"{name} of seed {seed}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_stages_have_the_gradients_of_one_process(schedule: str) -> None:
    for seed in seeds(12, quick=4):
        check_seed(seed, schedule)


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_random_stages_have_the_gradients_of_one_process(schedule: str) -> None:
    for seed in range(12, 500):
        check_seed(seed, schedule)


def test_a_split_backward_has_the_bits_of_the_whole_one() -> None:
    for seed in seeds(20, quick=6):
        whole, split = draw_model(seed, 3), draw_model(seed, 3)
        batches = batches_of(seed, NUM_MICROBATCHES)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            train_by(SCHEDULES["eager-1f1b"](3, NUM_MICROBATCHES), whole, batches)
            train_by(SCHEDULES["zb-h1"](3, NUM_MICROBATCHES), split, batches)
        expected = state_of(whole)
        assert not [name for name, value in state_of(split).items() if not torch.equal(value, expected[name])], seed
