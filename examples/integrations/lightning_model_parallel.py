"""Lightning's guide to model parallel training, with one line changed: the strategy.

    torchrun --nproc-per-node 2 examples/integrations/lightning_model_parallel.py FOLDER
    torchrun --nproc-per-node 3 examples/integrations/lightning_model_parallel.py FOLDER

The first job saves after every second step and kills itself behind its fifth; the second one, of another number of
processes, goes on from the newest checkpoint. `remesh run --mode restart` starts both as they are.
"""

import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import remesh
from remesh.integrations.lightning import RemeshModelParallelStrategy

NUM_STEPS, KILLED_AT = 8, 5


class Module(L.LightningModule):
    """A small model under FSDP2; all processes see the same data, so that any number of them has the same losses."""

    def __init__(self, is_killed: bool) -> None:
        super().__init__()
        self.is_killed = is_killed
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.layers(inputs), wanted)
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {float(loss.detach()):.6f}", flush=True)
        return loss

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if self.is_killed and self.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers.parameters(), lr=0.02)


def main() -> None:
    folder = Path(sys.argv[1])
    generator = torch.Generator().manual_seed(1)
    # Every batch is the same: Lightning begins again with the first one where the loader keeps no position.
    inputs = torch.randn(12, 6, generator=generator).repeat(NUM_STEPS, 1)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12)
    newest = remesh.latest_complete(folder)
    name = "step-{step:08d}"  # as latest_complete looks for
    saver = ModelCheckpoint(folder, name, auto_insert_metric_name=False, every_n_train_steps=2, save_top_k=-1)
    saver.FILE_EXTENSION = ""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=RemeshModelParallelStrategy(process_group_backend="gloo"),
        callbacks=[saver],
        max_steps=NUM_STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(is_killed=newest is None), data, ckpt_path=newest)


if __name__ == "__main__":
    main()
