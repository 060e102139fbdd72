"""Processes under DDP that hold other values each, saved and loaded; prints ``apart`` and ``kept`` for each process.

Batch norm's means and variances differ behind every step; in LocalSGD weights and momentum do, until they are averaged.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate.local_sgd import LocalSGD
from torch import nn

from remesh.integrations.accelerate import RemeshAccelerator


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    moments = [optimizer.state[one]["momentum_buffer"] for one in model.parameters()]
    return torch.cat([one.detach().double().reshape(-1) for one in (*model.state_dict().values(), *moments)])


def main(folder: Path, num_local_steps: int) -> None:
    accelerator = RemeshAccelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(one for _ in range(3) for one in (nn.Linear(3, 3), nn.BatchNorm1d(3))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    with LocalSGD(accelerator, wrapped, num_local_steps, enabled=num_local_steps > 1) as local:
        for _ in range(3):
            wrapped(torch.randn(6, 3)).square().mean().backward()
            prepared.step()
            prepared.zero_grad()
            local.step()
        expected = accelerator.gather(_numbers(model, optimizer)[None])
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        kept = _numbers(model, optimizer).equal(expected[0])
    apart = not expected[0].equal(expected[1])
    print(f"process {accelerator.process_index} apart {apart} kept {kept}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
