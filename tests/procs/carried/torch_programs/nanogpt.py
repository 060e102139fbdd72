"""In the shape of nanoGPT: batches out of a file that is mapped, gradients accumulated, its own checkpoints. STEPS"""

import hashlib
import math
import os
import pickle
import sys
import tempfile
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import barrier, broadcast_object_list, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

max_iters, block_size, batch_size, vocabulary, width, accumulated = int(sys.argv[1]), 32, 4, 65, 32, 4
init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
accumulated //= ddp_world_size
torch.manual_seed(1337 + ddp_rank)
place = [tempfile.mkdtemp() if master_process else None]
broadcast_object_list(place)
data_dir = place[0]
if master_process:
    tokens = np.random.default_rng(0).integers(0, vocabulary, 20000).astype(np.uint16)
    tokens[:18000].tofile(os.path.join(data_dir, "train.bin"))
    tokens[18000:].tofile(os.path.join(data_dir, "val.bin"))
    with open(os.path.join(data_dir, "meta.pkl"), "wb") as file:
        pickle.dump({"vocab_size": vocabulary}, file)
barrier()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.attention(self.norm(x)).split(width, dim=2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(self.mlp(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x, targets):
        logits = self.head(self.blocks(self.tokens(x) + self.places(torch.arange(x.size(1)))))
        return F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1))


def get_batch(split):
    # Mapped again for every batch, as nanoGPT does against a leak of memory.
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x, y = (
        torch.stack([torch.from_numpy(data[i + off : i + off + block_size].astype(np.int64)) for i in ix])
        for off in (0, 1)
    )
    return x, y


@torch.no_grad()
def estimate_loss():
    raw.eval()
    found = {split: torch.tensor([raw(*get_batch(split)) for _ in range(5)]).mean() for split in ("train", "val")}
    raw.train()
    return found


raw = GPT()
decay = [p for p in raw.parameters() if p.dim() >= 2]
others = [p for p in raw.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others}], lr=1e-3, betas=(0.9, 0.95))
model = DistributedDataParallel(raw)
best, (x, y) = 1e9, get_batch("train")
for iteration in range(1, max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * iteration / max_iters))
    if iteration % 25 == 0 and master_process:
        losses = estimate_loss()
        if losses["val"] < best:
            best = losses["val"]
            torch.save({"model": raw.state_dict(), "best": best}, os.path.join(data_dir, "ckpt.pt"))
    for micro_step in range(accumulated):
        model.require_backward_grad_sync = micro_step == accumulated - 1
        with nullcontext():
            loss = model(x, y) / accumulated
        x, y = get_batch("train")
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(iteration, (loss.item() * accumulated).hex(), norm.item().hex(), float(best).hex(), flush=True)
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in raw.parameters())).hexdigest()
print("end", ddp_rank, digest, flush=True)
destroy_process_group()
