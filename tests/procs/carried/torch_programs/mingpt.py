"""A small GPT as minGPT has it: own blocks, character data, a log file that stays open. STEPS [WORKERS] [--compile]"""

import hashlib
import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 4, 1
TEXT = "".join(chr(97 + (7 * i * i + 3 * i) % 26) if i % 6 else " " for i in range(20000))
LETTERS = sorted(set(TEXT))


class Characters(Dataset):
    def __init__(self):
        number = {letter: i for i, letter in enumerate(LETTERS)}
        self.data = torch.tensor([number[letter] for letter in TEXT])

    def __len__(self):
        return len(self.data) - CONTEXT

    def __getitem__(self, i):
        chunk = self.data[i : i + CONTEXT + 1]
        return chunk[:-1], chunk[1:]


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (each.view(b, t, HEADS, c // HEADS).transpose(1, 2) for each in self.qkv(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (c // HEADS) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        mixed = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1)))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


steps = int(sys.argv[1])
workers = int(sys.argv[2]) if len(sys.argv) > 2 else 0
dist.init_process_group("gloo")
rank = dist.get_rank()
notes = tempfile.NamedTemporaryFile("w+", suffix=f"-{rank}.log", delete=False)  # noqa: SIM115
logger = logging.getLogger("train")
logger.addHandler(logging.StreamHandler(notes))
logger.setLevel(logging.INFO)
torch.manual_seed(0)
model = GPT()
whole = DistributedDataParallel(model)
if "--compile" in sys.argv:
    whole = torch.compile(whole)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
data = Characters()
sampler = DistributedSampler(data, seed=5)
torch.manual_seed(10 + rank)
batches = iter(DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers, persistent_workers=workers > 0))
for step in range(1, steps + 1):
    x, y = next(batches)
    loss = whole(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    logger.info("step %d loss %s", step, loss.item().hex())
    if rank == 0:
        print(step, loss.item().hex(), flush=True)
notes.seek(0)
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
print("end", rank, digest, hashlib.sha256(notes.read().encode()).hexdigest(), flush=True)
os.remove(notes.name)
dist.destroy_process_group()
