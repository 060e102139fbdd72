"""Ranks of a measured pipeline: one stage each; every contestant in turn, many times.

Contestants take turns, so that a busy moment of the machine meets all of them. A step begins when all ranks have agreed
on it and ends with the last rank that is done.
"""

from __future__ import annotations

import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from remesh.pipeline import Payload, Pipeline, Schedule, Stage, StageGraph, Transfers

WARM_UPS = 1


@dataclass(frozen=True)
class Part:
    """One rank's part of a case."""

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    target: torch.Tensor | None
    loss: Callable[..., torch.Tensor] | None


Make = Callable[[int, int], Part]
"""From (stage, number of micro-batches); at the top of a module, or a partial of such."""


@dataclass(frozen=True)
class Contestant:
    """One way to run a step."""

    name: str
    schedule: Schedule
    transfers: Transfers = Transfers.ASYNC
    payload: Payload = Payload.VALUES


@dataclass(frozen=True)
class Told:
    """What one rank saw."""

    seconds: dict[str, list[float]]
    """By contestant, of each step."""
    peak_stashes: dict[str, int]
    compute_s: dict[str, float]
    """By kind of action, the median time of those of a step."""


def measure(make: Make, graph: StageGraph, contestants: Sequence[Contestant], repeat: int) -> Told:
    """Run all contestants, with the same number of micro-batches, on one model."""
    rank = dist.get_rank()
    part = make(rank, contestants[0].schedule.num_microbatches)
    stage = Stage(rank, part.module, loss=part.loss)
    pipelines = {
        each.name: Pipeline(stage, graph, each.schedule, transfers=each.transfers, payload=each.payload)
        for each in contestants
    }
    told = Told({name: [] for name in pipelines}, {}, {})
    times: dict[str, list[float]] = {}
    for turn in range(WARM_UPS + repeat):
        for name, pipeline in pipelines.items():
            report = pipeline.step(part.batch, part.target)
            told.peak_stashes[name] = report.peak_stashes
            if turn >= WARM_UPS:
                told.seconds[name].append(report.seconds)
                for span in report.spans:
                    times.setdefault(str(span.action.kind), []).append(span.end_s - span.start_s)
    told.compute_s.update({kind: statistics.median(values) for kind, values in times.items()})
    return told


def measure_torch(make: Make, num_microbatches: int, repeat: int) -> list[float]:
    """The same with torch's own Schedule1F1B, for chains of stages; the seconds of each step."""
    # Imported where it is measured: the rest of the benchmark runs without it.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415

    rank, size = dist.get_rank(), dist.get_world_size()
    part = make(rank, num_microbatches)
    module = _Positional(part.module)
    seconds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        loss = (lambda made, target: made.sum()) if part.loss is None else part.loss
        schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss)
        for turn in range(WARM_UPS + repeat):
            dist.barrier()
            begun_s = time.monotonic()
            if rank == 0:
                schedule.step(*part.batch.values())
            elif rank == size - 1:
                target = torch.zeros(num_microbatches) if part.target is None else part.target
                schedule.step(target=target)
            else:
                schedule.step()
            if turn >= WARM_UPS:
                seconds.append(time.monotonic() - begun_s)
    return seconds


class _Positional(nn.Module):
    """A stage as torch calls it: one value in, one out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        named = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.name = named[0].name if named else "hidden"

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.module(**{self.name: value})
        if isinstance(made, dict):
            (made,) = made.values()
        return made.reshape(1) if made.ndim == 0 else made
