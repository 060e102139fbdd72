"""Lightning's Trainer with its strategy "ddp", a CSV logger and checkpoints of its own. STEPS [WORKERS]"""

import hashlib
import os
import sys
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
warnings.simplefilter("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        if self.global_rank == 0:
            print(self.global_step + 1, loss.item().hex(), flush=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


lightning.seed_everything(1, verbose=False)
data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
held_out = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
with tempfile.TemporaryDirectory() as folder:
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=steps,
        val_check_interval=8,
        num_sanity_val_steps=0,
        logger=CSVLogger(folder, flush_logs_every_n_steps=5),
        log_every_n_steps=2,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(data, batch_size=8, shuffle=True, num_workers=workers),
        DataLoader(held_out, batch_size=8),
    )
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    print("end", trainer.global_rank, digest, flush=True)
    trainer.strategy.barrier()
