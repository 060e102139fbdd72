"""Accelerate's guide to checkpointing, with one line changed: the import of the ``Accelerator``.

    torchrun --nproc-per-node 2 examples/integrations/accelerate_checkpointing.py FOLDER
    torchrun --nproc-per-node 3 examples/integrations/accelerate_checkpointing.py FOLDER

The first job saves after every second step and kills itself behind its fifth; the second one, of another number of
processes, goes on from the newest checkpoint. The first process prints the losses of the steps that were taken.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from remesh.integrations.accelerate import RemeshAccelerator as Accelerator

NUM_STEPS, KILLED_AT, BATCH = 8, 5, 12


class Position:
    """The step, registered with the accelerator."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = Accelerator(
        cpu=True,
        # A batch is that of the whole job, however many processes share it.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(7)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs = torch.randn(NUM_STEPS * BATCH, 6)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    position = Position()
    accelerator.register_for_checkpointing(position)
    is_new = not (folder / "checkpoints").exists()
    accelerator.wait_for_everyone()
    if not is_new:
        accelerator.load_state()
        accelerator.project_configuration.iteration = position.step // 2
    for batch, wanted in accelerator.skip_first_batches(data, position.step):
        if is_new and position.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(model(batch), wanted)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        position.step += 1
        mean = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            print(f"step {position.step} loss {float(mean):.6f} of {accelerator.num_processes}", flush=True)
        if position.step % 2 == 0:
            accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
