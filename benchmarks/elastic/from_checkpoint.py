"""The small training as programs write it that are called anew after a failure: it begins at the last checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.elastic.model import BATCH_SIZE, SAVE_EVERY, STEP_S, make_batch, make_model, pace
from remesh.elasticity.telemetry.events import EventLog

_CPU = torch.device("cpu")


def train_from_checkpoint(folder: Path, num_steps: int, log: EventLog, device: torch.device = _CPU) -> None:
    """Train on the default group up to a step; its first rank saves to ``folder``, all begin there."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = folder / "checkpoint.pt"
    model = make_model().to(device)
    optim = torch.optim.AdamW(model.parameters())
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        step = saved["step"]
    while step < num_steps:
        with pace(STEP_S):
            x = make_batch(step, rank, BATCH_SIZE // world_size).to(device)
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
