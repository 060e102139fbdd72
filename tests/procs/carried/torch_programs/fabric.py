"""Lightning's Fabric around a loop of one's own, with gradients accumulated, workers and a logger. STEPS [WORKERS]"""

import hashlib
import os
import sys
import tempfile
import warnings

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
warnings.simplefilter("ignore")
with tempfile.TemporaryDirectory() as folder:
    logger = CSVLogger(folder, flush_logs_every_n_steps=5)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), loggers=logger)
    fabric.launch()
    fabric.seed_everything(2 + fabric.global_rank, verbose=False)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True, num_workers=workers))
    step = 0
    while step < steps:
        for index, (x, y) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
            if index % 2 == 0:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            losses = fabric.all_gather(loss.detach())
            fabric.log("loss", losses.mean().item(), step)
            if fabric.is_global_zero:
                print(step, *(each.hex() for each in losses.tolist()), flush=True)
            if step == steps:
                break
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    print("end", fabric.global_rank, digest, flush=True)
    fabric.barrier()
