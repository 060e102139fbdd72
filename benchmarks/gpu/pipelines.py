"""A step of a pipeline with a stage on each rank, beside torch's own, against what a stage computes without waiting."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.gpu.bench_rank import BenchRank, Compared
from benchmarks.gpu.moves import need_ranks
from remesh.pipeline import Pipeline, Stage, StageGraph
from remesh.pipeline.schedules import SCHEDULES

_NUM_LAYERS = 4
"""Of each stage."""
_ROWS, _WIDTH, _SMALL_WIDTH = 4096, 4096, 16
"""Of the values of a micro-batch."""


class Layers(nn.Module):
    """One stage: takes and makes ``hidden``."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, device=device, dtype=torch.bfloat16) for _ in range(_NUM_LAYERS)]
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


def _loss_of(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((made - target) ** 2).mean()


def step(place: BenchRank) -> Compared:
    """1F1B with four micro-batches for each stage, over the network of the devices."""
    need_ranks(place, 2)
    num_microbatches = 4 * place.world_size
    width = _SMALL_WIDTH if place.is_small else _WIDTH
    rows = num_microbatches * (width if place.is_small else _ROWS)
    is_first, is_last = place.rank == 0, place.rank == place.world_size - 1
    x, y = (torch.randn(rows, width, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    module = Layers(width, place.device)

    pipeline = Pipeline(
        Stage(place.rank, module, loss=_loss_of if is_last else None),
        StageGraph.chain(place.world_size),
        SCHEDULES["1f1b"](place.world_size, num_microbatches),
        group=place.network,
    )
    run_ours = lambda: pipeline.step({"hidden": x} if is_first else {}, y if is_last else None)  # noqa: E731
    run_ours()
    ours = place.seconds(run_ours)

    stage = PipelineStage(module, place.rank, place.world_size, place.device, group=place.network)
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_loss_of)
    run_torchs = lambda: schedule.step(*[x] * is_first, target=y if is_last else None, return_outputs=False)  # noqa: E731
    run_torchs()
    theirs = place.seconds(run_torchs)

    slots = num_microbatches + place.world_size - 1
    alone = place.seconds(lambda: _compute(module, x[: rows // num_microbatches], slots))
    return Compared("", 1e3 * ours, "torch's Schedule1F1B", 1e3 * theirs, "its compute and bubbles alone", 1e3 * alone)


def _compute(module: nn.Module, x: torch.Tensor, times: int) -> None:
    for _ in range(times):
        hidden = x.detach().requires_grad_()
        _loss_of(module(hidden), x).backward()
