"""Children are forked in the middle of collectives, and live on beside them. STEPS"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
value, digest = torch.arange(1000.0) + rank, hashlib.sha256()
for step in range(1, int(sys.argv[1]) + 1):
    work = dist.all_reduce(value, async_op=True)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, hashlib.sha256(b"%d" % step * 300_000).digest())
        os._exit(0)
    work.wait()
    value /= world
    os.close(theirs)
    digest.update(os.read(ours, 32) + value.numpy().tobytes())
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0
    if rank == 0:
        print(step, digest.hexdigest(), flush=True)
print("end", rank, digest.hexdigest(), flush=True)
dist.destroy_process_group()
