"""Accelerate's guides to gradient accumulation and to several models in one: a GAN in bf16, with a tied layer.

    accelerate_gan.py FOLDER ours|theirs KILLED_AT

Each update saves. The first process leaves all weights in FOLDER/end.pt.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[2] == "ours":
    from remesh.integrations.accelerate import RemeshAccelerator as Accelerator
else:
    from accelerate import Accelerator

NUM_BATCHES, BATCH = 8, 6


class Average:
    """The mean of the generator's weights over the updates, registered with the accelerator."""

    def __init__(self, model: nn.Module) -> None:
        self.batch = 0
        self.held = {name: torch.zeros_like(one) for name, one in model.named_parameters()}

    def take(self, model: nn.Module) -> None:
        for name, one in model.named_parameters():
            self.held[name].mul_(0.9).add_(one.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, object]:
        return {"batch": self.batch, "held": self.held}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.batch, self.held = state["batch"], state["held"]


class Critic(nn.Module):
    """Its two middle layers are one; the last one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.two.weight = self.one.weight
        self.last.requires_grad_(False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.one(torch.tanh(self.first(given)))))))


def main(folder: Path, killed_at: int) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(7)
    generator, critic = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)), Critic()
    make = torch.optim.RMSprop(generator.parameters(), lr=0.02, momentum=0.9, centered=True)
    judge = torch.optim.SGD(critic.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    warm = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(make, 3)
    data = DataLoader(TensorDataset(torch.randn(NUM_BATCHES * BATCH, 5)), batch_size=BATCH)
    generator, critic, make, judge, warm, data = accelerator.prepare(generator, critic, make, judge, warm, data)
    average = Average(generator)
    accelerator.register_for_checkpointing(average)
    saved = sorted(folder.glob("update-*"))
    accelerator.wait_for_everyone()
    if saved:
        accelerator.load_state(saved[-1])
    for (real,) in accelerator.skip_first_batches(data, average.batch):
        if average.batch == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        noise = torch.randn(
            len(real), 3, generator=torch.Generator().manual_seed(2 * average.batch + accelerator.process_index)
        )
        with accelerator.accumulate(generator, critic):
            fake = generator(noise)
            scores = critic(torch.cat([fake.detach(), real]))
            accelerator.backward(scores[: len(fake)].mean() - scores[len(fake) :].mean())
            judge.step()
            judge.zero_grad()
            accelerator.backward(-critic(fake).mean())
            make.step()
            warm.step()
            make.zero_grad()
            judge.zero_grad()
        average.batch += 1
        if accelerator.sync_gradients:
            average.take(generator)
            accelerator.save_state(folder / f"update-{average.batch}")
    if accelerator.is_main_process:
        models = [accelerator.unwrap_model(one).state_dict() for one in (generator, critic)]
        torch.save([*models, average.held, make.optimizer.state_dict()["state"]], folder / "end.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]))
