"""Pipelines on real ranks train as one process does: the same bits, by every schedule."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from remesh.pipeline.costs import Costs
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.runtime import Pipeline
from remesh.pipeline.running.stage import Stage
from remesh.pipeline.running.step_runner import StepReport
from remesh.pipeline.running.tuning import gather_costs
from remesh.pipeline.schedules import SCHEDULES
from remesh.pipeline.search import search_schedule
from remesh.pipeline.step_simulation import Transfers
from remesh.testbed.pool import RankPool

WIDTH = 6


class Layers(nn.Module):
    """A few layers; takes and makes ``hidden``."""

    def __init__(self, seed: int, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.double()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            hidden = hidden + torch.tanh(linear(hidden)) * self.scale
        return self.norm(hidden)


def loss_of(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((made - target) ** 2).mean()


def batch_of(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (num_samples, WIDTH)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def train_alone(stages: list[nn.Module], num_microbatches: int) -> torch.Tensor:
    """The oracle: one process, one micro-batch after the other; the loss, and gradients are added."""
    x, y = batch_of(4 * num_microbatches)
    losses = []
    for part, target in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
        for stage in stages:
            part = stage(part)
        losses.append(loss_of(part, target))
        (losses[-1] / num_microbatches).backward()
    return torch.stack(losses).detach().mean()


def train_chain(schedule: str, num_microbatches: int, transfers: Transfers) -> StepReport:
    rank, size = dist.get_rank(), dist.get_world_size()
    stages: list[nn.Module] = [Layers(seed) for seed in range(size)]
    alone: list[nn.Module] = [Layers(seed) for seed in range(size)]
    stage = Stage(rank, stages[rank], loss=loss_of if rank == size - 1 else None)
    pipeline = Pipeline(stage, StageGraph.chain(size), SCHEDULES[schedule](size, num_microbatches), transfers=transfers)
    x, y = batch_of(4 * num_microbatches)
    batch = {"hidden": x} if rank == 0 else {}
    for _ in range(2):
        loss = train_alone(alone, num_microbatches)
        report = pipeline.step(batch, y if rank == size - 1 else None)
        expected, found = gradients_of(alone[rank]), gradients_of(stages[rank])
        assert expected.keys() == found.keys()
        assert not [name for name in found if not torch.equal(expected[name], found[name])]
        assert (report.loss is None) == (rank < size - 1)
        assert report.loss is None or torch.equal(report.loss, loss)
    return report


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("size", "transfers"),
    [(1, Transfers.ASYNC), (2, Transfers.BLOCKING), (3, Transfers.ASYNC), (4, Transfers.BLOCKING)],
)
def test_every_schedule_gives_the_bits_of_one_process(
    ranks: RankPool, schedule: str, size: int, transfers: Transfers
) -> None:
    reports: list[StepReport] = ranks.run(train_chain, size, (schedule, 6, transfers))
    table = SCHEDULES[schedule](size, 6)
    assert [[span.action for span in report.spans] for report in reports] == [list(row) for row in table.rows]


def tune(num_microbatches: int) -> tuple[Costs, str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, Layers(rank), loss=loss_of if rank == size - 1 else None)
    graph = StageGraph.chain(size)
    x, y = batch_of(4 * num_microbatches)
    batch, target = {"hidden": x} if rank == 0 else {}, y if rank == size - 1 else None
    hosts = {each: f"host{each}" for each in range(size)}
    pipeline = Pipeline(stage, graph, SCHEDULES["1f1b-split"](size, num_microbatches), host_of=hosts)
    costs = gather_costs(pipeline, pipeline.step(batch, target), 1e6)
    with pytest.raises(PipelineError, match="expected a rate above 0"):
        gather_costs(pipeline, pipeline.step(batch, target), 0.0)
    found = search_schedule(graph, costs, num_microbatches)
    report = Pipeline(stage, graph, found.schedule).step(batch, target)
    assert report.peak_stashes == found.peaks[rank].num_live
    return costs, str(found.schedule)


def test_a_measured_step_finds_the_schedule_of_the_next(ranks: RankPool) -> None:
    (first, *others) = ranks.run(tune, 3, (6,))
    assert all(each == first for each in others)
    costs, _ = first
    assert all(stage.forward_s > 0 and stage.weight_grad_s > 0 for stage in costs.stages)
    assert [stage.input_grad_s > 1e-5 for stage in costs.stages[1:]] == [True, True]
    nbytes = 4 * WIDTH * 8
    assert all(edge.forward_s == edge.backward_s == nbytes / 1e6 for edge in costs.edges)
