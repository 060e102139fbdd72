"""Lightning's guide to manual optimization: a GAN with two optimizers of other kinds, accumulation, sharded by FSDP2.

    lightning_gan.py FOLDER ours|theirs KILLED_AT

Each epoch is one batch, and is saved. The first process leaves all weights in FOLDER/end.pt.
"""

import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[2] == "ours":
    from remesh.integrations.lightning import RemeshModelParallelStrategy as Strategy
else:
    from lightning.pytorch.strategies import ModelParallelStrategy as Strategy

NUM_EPOCHS = 6


class Gan(L.LightningModule):
    """Two models, two optimizers, two schedules; gradients of two batches to each update."""

    def __init__(self, killed_at: int) -> None:
        super().__init__()
        self.killed_at = killed_at
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        for one in (self.generator, self.critic):
            fully_shard(one, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        make = torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9)
        judge = torch.optim.AdamW(self.critic.parameters(), lr=0.02, amsgrad=True)
        return [make, judge], [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (make, judge)]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if self.current_epoch == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        make, judge = self.optimizers()
        made_of = torch.Generator().manual_seed(2 * self.current_epoch + self.global_rank)
        for _ in range(2):
            fake = self.generator(torch.randn(4, 3, generator=made_of))
            real = torch.randn(4, 5, generator=made_of)
            self.manual_backward((self.critic(fake.detach()) - self.critic(real)).mean() / 2)
        judge.step()
        judge.zero_grad()
        self.manual_backward(-self.critic(self.generator(torch.randn(4, 3, generator=made_of))).mean())
        make.step()
        make.zero_grad()
        judge.zero_grad()
        for one in self.lr_schedulers():
            one.step()

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["told by the module"] = {"epoch": self.current_epoch, "sizes": [3, 8, 5]}

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        assert checkpoint["told by the module"] == {"epoch": checkpoint["epoch"], "sizes": [3, 8, 5]}


def main(folder: Path, killed_at: int) -> None:
    saver = ModelCheckpoint(folder, "epoch-{epoch}", auto_insert_metric_name=False, every_n_epochs=1, save_top_k=-1)
    saved = sorted(folder.glob("epoch-*"))
    num_ranks = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=Strategy(num_ranks, 1, process_group_backend="gloo"),
        callbacks=[saver],
        max_epochs=NUM_EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Gan(killed_at)
    trainer.fit(model, DataLoader(TensorDataset(torch.zeros(num_ranks, 1))), ckpt_path=saved[-1] if saved else None)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if trainer.global_rank == 0:
        torch.save([weights], folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]))
