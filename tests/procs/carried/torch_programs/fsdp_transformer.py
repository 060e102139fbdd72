"""FSDP2 as in an example of torch: a transformer, layers sharded and prefetched by hand, mixed precision. STEPS"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, LENGTH, WIDTH, LAYERS = 64, 16, 32, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Transformer()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
for number, layer in enumerate(model.layers):
    layer.set_modules_to_forward_prefetch(list(model.layers)[number + 1 : number + 3])
    layer.set_modules_to_backward_prefetch(list(model.layers)[max(number - 2, 0) : number][::-1])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(20 + rank)
for step in range(1, int(sys.argv[1]) + 1):
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH))
    model.unshard()
    loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(step, loss.item().hex(), norm.full_tensor().item().hex(), flush=True)
    else:
        norm.full_tensor()
shards = b"".join(each.to_local().detach().numpy().tobytes() for each in model.parameters())
print("end", rank, hashlib.sha256(shards).hexdigest(), flush=True)
dist.destroy_process_group()
