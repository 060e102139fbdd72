"""A program that times itself. CASES (of the table below, separated by commas) SECONDS to go on after that, or "turns".

With "turns" it is carried, and compares itself with torch alone: steps over a group of ours and over one of torch's own
take turns in the same processes, so that whatever disturbs the machine disturbs both.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_CLOCKS = {"passed": time.perf_counter, "computed": time.process_time}
_NUM_WARM = 2


@dataclass(frozen=True)
class Case:
    """A model, and how often its step is timed."""

    build: Callable[[Any, int, int], nn.Module]
    width: int
    num_layers: int
    num_steps: int

    def make_step(self, group: Any) -> Callable[[], None]:
        """A training step over a group."""
        model = self.build(group, self.width, self.num_layers)
        optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(8, self.width)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


def build_ddp(group: Any, width: int, num_layers: int) -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    return DistributedDataParallel(layers, process_group=group)


def build_fsdp(group: Any, width: int, num_layers: int) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


CASES = {
    "ddp-4": Case(build_ddp, 1000, 4, 15),
    "ddp-25": Case(build_ddp, 2236, 5, 6),
    "fsdp": Case(build_fsdp, 512, 8, 20),
}


def time_step(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of a step by each clock."""
    began = {name: clock() for name, clock in _CLOCKS.items()}
    step()
    return {name: clock() - began[name] for name, clock in _CLOCKS.items()}


def time_steps(case: Case) -> float:
    """Seconds of the fastest step."""
    step = case.make_step(dist.group.WORLD)
    return min(time_step(step)["passed"] for _ in range(case.num_steps))


def make_native() -> Any:
    """A group of torch's own in a carried program."""
    ours, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, ProcessGroupGloo
    try:
        return dist.new_group()
    finally:
        c10d.ProcessGroupGloo = ours


def time_turns(case: Case, native: Any) -> dict[str, float]:
    """Seconds of a step over torch's own group, and the ratios of ours to them, by each clock; medians."""
    steps = [case.make_step(native), case.make_step(dist.group.WORLD)]
    turns = []
    for number in range(_NUM_WARM + 2 * case.num_steps):
        found: list[dict[str, float]] = [{}, {}]
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier(native)
            found[which] = time_step(steps[which])
        turns.append(found)
    turns = turns[_NUM_WARM:]
    ratios = {name: median(ours[name] / alone[name] for alone, ours in turns) for name in _CLOCKS}
    return {"native": median(alone["passed"] for alone, _ in turns), **ratios}


dist.init_process_group("gloo")
wanted = sys.argv[1].split(",")
if sys.argv[2] == "turns":
    native = make_native()
    print_as = {name: time_turns(CASES[name], native) for name in wanted}
else:
    print_as = {name: time_steps(CASES[name]) for name in wanted}
if dist.get_rank() == 0:
    print(json.dumps(print_as), flush=True)
if sys.argv[2] != "turns":
    until = torch.tensor([time.monotonic() + float(sys.argv[2])])
    while True:
        dist.broadcast(left := until - time.monotonic(), 0)
        if left.item() < 0:
            break
dist.destroy_process_group()
