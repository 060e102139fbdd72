"""Settings of a test of device memory: the same body on GPUs and on the CPU.

The CPU shows that the test can pass and fail.

A setting that this machine lacks is skipped by the name of what it needs. Settings on the CPU belong to the tier
`procs`, all others to the tier `gpu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh.comm.gather import Group
from remesh.testbed.pool import RankPool


@dataclass(frozen=True)
class Setting:
    """Ranks, what they talk over, and how many GPUs they share."""

    backend: str
    world_size: int
    num_gpus: int

    @property
    def device_type(self) -> str:
        return "cuda" if self.num_gpus else "cpu"

    def __str__(self) -> str:
        where = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}" if self.num_gpus else "the CPU"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} over {self.backend} on {where}"

    def run(self, ranks: RankPool, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call ``body(place, *args)`` on every rank; skips where GPUs are missing."""
        skip_without(self.num_gpus)
        return ranks.run(_run_in, self.world_size, (self, body, args), **options)


@dataclass(frozen=True)
class Place:
    """One rank in a setting."""

    device: torch.device
    group: Group
    rank: int
    world_size: int

    def share_of(self, length: int) -> tuple[int, int]:
        """The part of so many rows that is this rank's: first, and behind the last."""
        return self.rank * length // self.world_size, (self.rank + 1) * length // self.world_size

    def own_stream(self) -> contextlib.AbstractContextManager[object]:
        """A new stream as the current one, which waits for no other; nothing on the CPU."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait until the device has nothing to do, on any stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


CPU = Setting("gloo", 2, 0)
SHARED = Setting("gloo", 2, 1)
ALONE = Setting("nccl", 1, 1)
TWO = Setting("nccl", 2, 2)
BY_HOST = Setting("gloo", 2, 2)


WITHOUT_TWIN = {
    "test_tensors_of_another_device_go_through_that_of_the_group": "a host has one memory, and no second device",
    "test_peers_reach_each_others_memory": "it tells what the devices of a machine can do",
}
"""Tests of this folder that do not run on the CPU too, and why."""


def in_settings(*settings: Setting) -> pytest.MarkDecorator:
    """Let the argument ``setting`` of a test be each of these."""
    marks = {False: (pytest.mark.procs,), True: (pytest.mark.gpu,)}
    return pytest.mark.parametrize(
        "setting", [pytest.param(one, id=str(one), marks=marks[one.num_gpus > 0]) for one in settings]
    )


def skip_without(num_gpus: int) -> None:
    """Skip the test that calls this, unless the machine has so many GPUs."""
    if num_gpus and (found := torch.cuda.device_count()) < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices, found {found}")


def _run_in(setting: Setting, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, group = torch.device("cpu"), None
    if setting.num_gpus:
        device = torch.device("cuda", rank % setting.num_gpus)
        torch.cuda.set_device(device)
    if setting.backend == "nccl":
        group = dist.new_group(backend="nccl", device_id=device)
    return body(Place(device, group, rank, world_size), *args)
