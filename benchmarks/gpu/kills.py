"""Seconds from a worker's death to the next step, of a job on the GPUs of one machine, beside torchrun's restart."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.elastic.phases import Recovery
from benchmarks.elastic.sides import JobShape, NotRecovered, RemeshSide, TorchrunSide, hurt_often
from benchmarks.gpu.bench_rank import BenchRank, Compared, NotRun

_NUM_KILLS = 3
_LEAST_WORKERS = 2
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # 1, by which elastic jobs over NCCL refuse to start
)
"""How the variables begin that torchrun has set for this process: the jobs that it starts are of their own."""


def killed_to_step(place: BenchRank) -> Compared:
    """The first rank hurts a job with a worker for each GPU of its machine; the others wait."""
    num_workers = _LEAST_WORKERS if place.is_small else torch.cuda.device_count()
    told: list[Compared | str] = [""]
    if place.rank == 0:
        told = [_measure(place, num_workers)]
    dist.broadcast_object_list(told)
    if isinstance(told[0], str):
        raise NotRun(told[0])
    return told[0]


def _measure(place: BenchRank, num_workers: int) -> Compared | str:
    if num_workers < _LEAST_WORKERS:
        return f"needs {_LEAST_WORKERS} GPUs on the machine of rank 0, found {num_workers}"
    shape = JobShape(("a",), num_workers)
    num_kills = 1 if place.is_small else _NUM_KILLS
    try:
        with _own_environment({"CUDA_VISIBLE_DEVICES": ""} if place.is_small else {}):
            ours, theirs = (_recoveries(kind, shape, num_kills) for kind in (RemeshSide, TorchrunSide))
    except NotRecovered as raised:
        return f"a job did not come back: {raised}"
    computing = statistics.median(one.phases["computing"] for one in ours)
    return Compared(
        "", _median_s(ours), "torchrun, from a checkpoint", _median_s(theirs), "end of the step that was hit", computing
    )


def _recoveries(kind: type[RemeshSide | TorchrunSide], shape: JobShape, num_kills: int) -> list[Recovery]:
    with tempfile.TemporaryDirectory() as folder, kind(Path(folder) / "job", shape) as side:
        return list(hurt_often(side, "worker", num_kills))


def _median_s(recoveries: list[Recovery]) -> float:
    return statistics.median(one.seconds for one in recoveries)


@contextmanager
def _own_environment(more: Mapping[str, str]) -> Iterator[None]:
    """Without what torchrun has set for this process."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_OF_TORCHRUN):
            del os.environ[name]
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
