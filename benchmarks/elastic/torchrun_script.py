"""The same small training as ``remesh_script.py``, written for torchrun: it restarts from a checkpoint."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.elastic.model import BATCH_SIZE, SAVE_EVERY, STEP_S, make_batch, make_model, pace
from remesh.elastic.events import EventLog


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log = EventLog(options.folder / "events", f"worker-{os.getpid()}")
    checkpoint = options.folder / "checkpoint.pt"
    model: nn.Module = make_model()
    optim = torch.optim.AdamW(model.parameters())
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        step = saved["step"]
    while step < options.steps:
        with pace(STEP_S):
            x = make_batch(step, rank, BATCH_SIZE // world_size)
            (model(x) - x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optim.step()
            optim.zero_grad()
        step += 1
        log.write("step", step=step, rank=rank, world_size=world_size)
        if step % SAVE_EVERY == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": step}, f"{checkpoint}.tmp")
            Path(f"{checkpoint}.tmp").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
