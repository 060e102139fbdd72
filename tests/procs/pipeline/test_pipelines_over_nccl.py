"""Pipelines over NCCL alone train as one process does; on groups that call themselves so."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from remesh.foundation.errors import PeerError
from remesh.pipeline import Pipeline, Stage, StageGraph, Transfers
from remesh.pipeline.schedules import SCHEDULES
from remesh.testbed.pool import RankPool
from tests.fake_nccl import BelievedGroup, believed_group
from tests.procs.groups.test_fake_nccl import loses_on_rank
from tests.procs.pipeline.random_meshes import SEVERAL_STAGES, torch_schedule
from tests.profiles import seeds
from tests.unit.pipeline.cases import random_schedule
from tests.unit.pipeline.random_stages import batches_of, draw_model, loss_of, train_alone

WIDTH, NUM_MICROBATCHES = 4, 4


def train_at_random(seed: int) -> None:
    """All ranks draw the same stages, the values between them, and the schedule."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = draw_model(seed, size), draw_model(seed, size)
    chance = random.Random(seed)
    batches = batches_of(seed, chance.randint(1, 6))
    schedule = random_schedule(chance, model.graph, len(batches))
    stage = Stage(rank, model.stages[rank], loss=loss_of if rank == size - 1 else None)
    with warnings.catch_warnings(), believed_group() as group:
        # Reentrant checkpointing of values without gradients says so, in one process and here.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        losses = train_alone(alone, batches)
        pipeline = Pipeline(stage, model.graph, schedule, group=group, transfers=chance.choice(list(Transfers)[:2]))
        report = pipeline.step({"x": batches} if rank == 0 else {})
        assert [span.action for span in report.spans] == list(schedule.rows[rank])
        if rank == size - 1:
            torch.testing.assert_close(list(report.losses), losses, rtol=1e-12, atol=0)
        named = zip(model.stages[rank].named_parameters(), alone.stages[rank].parameters(), strict=True)
        for (name, mine), other in named:
            expected = torch.zeros_like(other) if other.grad is None else other.grad
            found = torch.zeros_like(mine) if mine.grad is None else mine.grad
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13, msg=f"{name} of seed {seed}")


@pytest.mark.parametrize("seed", seeds(24, quick=4))
def test_random_pipelines_over_nccl_have_the_gradients_of_one_process(ranks: RankPool, seed: int) -> None:
    ranks.run(train_at_random, 2 + seed % 3, (seed,))


def train_several_stages(seed: int) -> None:
    """Two ranks with two stages each, by a table of torch."""
    rank = dist.get_rank()
    alone, model = draw_model(seed, 4), draw_model(seed, 4)
    batches = batches_of(seed, 4)
    schedule = torch_schedule(SEVERAL_STAGES[seed % len(SEVERAL_STAGES)], 4)
    mine = [index for index, row in schedule.row_of.items() if row == rank]
    stages = [Stage(at, model.stages[at], loss=loss_of if at == 3 else None, entries=() if at else None) for at in mine]
    with warnings.catch_warnings(), believed_group() as group:
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        train_alone(alone, batches)
        Pipeline(stages, model.graph, schedule, group=group).step({"x": batches} if 0 in mine else {})
    for at in mine:
        for one, other in zip(model.stages[at].parameters(), alone.stages[at].parameters(), strict=True):
            expected = torch.zeros_like(other) if other.grad is None else other.grad
            found = torch.zeros_like(one) if one.grad is None else one.grad
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("seed", range(5))
def test_several_stages_on_a_rank_over_nccl_have_the_gradients_of_one_process(ranks: RankPool, seed: int) -> None:
    ranks.run(train_several_stages, 2, (seed,))


class Layer(nn.Module):
    """One linear layer; fails in the forward of a given micro-batch."""

    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._failing, self._num_calls = failing, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._num_calls += 1
            if self._num_calls - 1 == self._failing:
                raise ValueError("the program's own")
        return self.linear(hidden)


def pipeline_with(layer: nn.Module, group: dist.ProcessGroup) -> Pipeline:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, layer, loss=torch.Tensor.mean if rank == size - 1 else None)
    return Pipeline(stage, StageGraph.chain(size), SCHEDULES["1f1b"](size, NUM_MICROBATCHES), group=group)


def lose_a_message(number: int) -> None:
    rank = dist.get_rank()
    batch = {"hidden": torch.ones(8, WIDTH)} if rank == 0 else {}
    with believed_group(loses_on_rank(1, "recv", number)) as group, pytest.raises(PeerError):
        pipeline_with(Layer(), group).step(batch)


@pytest.mark.parametrize("number", [1, 4])
def test_a_message_that_torch_gave_up_is_an_error_on_all_ranks(ranks: RankPool, number: int) -> None:
    ranks.run(lose_a_message, 3, (number,))


def fail_on_the_way() -> str:
    rank = dist.get_rank()
    with believed_group() as group:
        with pytest.raises((ValueError, PeerError)) as raised:
            pipeline = pipeline_with(Layer(failing=2 if rank == 1 else -1), group)
            pipeline.step({"hidden": torch.ones(8, WIDTH)} if rank == 0 else {})
        assert isinstance(group, BelievedGroup)
        group.give_up([])  # who goes on after an error aborts; neighbours learn of it as of a timeout
    return type(raised.value).__name__


def test_who_fails_raises_its_own_error_and_the_others_lose_a_peer(ranks: RankPool) -> None:
    assert [name.replace("Unfilled", "Peer") for name in ranks.run(fail_on_the_way, 3)] == [
        "PeerError", "ValueError", "PeerError",
    ]  # fmt: skip
