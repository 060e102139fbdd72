"""A pipeline whose stages lie on devices gives the bits of one process: edges keep the order of streams."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from remesh.comm.gather import Group
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.running.runtime import Pipeline
from remesh.pipeline.running.stage import Stage
from remesh.pipeline.schedules import SCHEDULES
from remesh.testbed.pool import RankPool
from tests.fake_nccl import believed_group
from tests.gpu.settings import BY_HOST, CPU, SHARED, TWO, Place, Setting, in_settings

WIDTH, NUM_MICROBATCHES = 64, 4


def loss_of(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((made - target) ** 2).mean()


class Layer(nn.Module):
    """Takes and makes ``hidden``."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH).to(device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def pipeline_of(layer: nn.Module, group: Group) -> Pipeline:
    """One with a layer on each rank."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    return Pipeline(
        Stage(rank, layer, loss=loss_of if rank == num_stages - 1 else None),
        StageGraph.chain(num_stages),
        SCHEDULES["1f1b"](num_stages, NUM_MICROBATCHES),
        group=group,
    )


def train_and_compare(place: Place) -> None:
    stages, alone = ([Layer(seed, place.device) for seed in range(place.world_size)] for _ in range(2))
    torch.manual_seed(9)
    x, y = (torch.randn(4 * NUM_MICROBATCHES, WIDTH).to(place.device) for _ in range(2))
    for part, target in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
        for stage in alone:
            part = stage(part)
        (loss_of(part, target) / NUM_MICROBATCHES).backward()
    rank, is_last = place.rank, place.rank == place.world_size - 1
    pipeline = pipeline_of(stages[rank], place.group)
    pipeline.step({"hidden": x} if rank == 0 else {}, y if is_last else None)
    expected, found = alone[rank].linear.weight.grad, stages[rank].linear.weight.grad
    assert expected is not None and found is not None
    assert torch.equal(expected, found)
    dist.barrier()


@in_settings(CPU, SHARED, BY_HOST, TWO)
def test_gradients_of_a_pipeline_are_those_of_one_process(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, train_and_compare)


def train_over_nccl(place: Place) -> None:
    with contextlib.nullcontext(place.group) if place.group is not None else believed_group() as group:
        train_and_compare(replace(place, group=group))


@in_settings(CPU)
def test_so_are_those_of_a_group_that_calls_itself_nccl(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, train_over_nccl)
