"""DeepSpeed's engine with its optimizer states, gradients and parameters apart over the ranks. STEPS [STAGE]"""

import hashlib
import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

steps, stage = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
logger.setLevel("ERROR")
# Shared memory between ranks of one host needs a compiler.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(15, 33), nn.LayerNorm(33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 7))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
}
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
torch.manual_seed(10 + rank)
for step in range(1, steps + 1):
    for _ in range(2):
        loss = engine(torch.randn(4, 15, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(step, mean.item().hex(), flush=True)
with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
    digest = hashlib.sha256(b"".join(each.detach().float().numpy().tobytes() for each in net.parameters())).hexdigest()
print("end", rank, digest, flush=True)
engine.destroy()
dist.destroy_process_group()
