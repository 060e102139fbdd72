"""Collectives and messages, some under way at a cut, and at last a collective that differs by rank. GO"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

go = Path(sys.argv[1])
dist.set_debug_level_from_env()  # again, for a process that was forked with torch in it
dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([1, 0])


def communicate(group: dist.ProcessGroup | None) -> None:
    total = torch.full((3,), rank + 1.0)
    works = [dist.all_reduce(total, group=group, async_op=True)]
    parts = [torch.zeros(2) for _ in range(2)]
    works.append(dist.all_gather(parts, torch.full((2,), float(rank)), group=group, async_op=True))
    if group is None:
        print(rank, "waits", flush=True)
        while not go.exists():
            time.sleep(0.01)
    for work in works:
        work.wait()
    first = torch.full((2,), 7.0 * (rank + 1))
    dist.broadcast(first, 0, group=group)
    ring = torch.zeros(1)
    batch = [dist.P2POp(dist.isend, total[:1].clone(), 1 - rank), dist.P2POp(dist.irecv, ring, 1 - rank)]
    for each in dist.batch_isend_irecv(batch):
        each.wait()
    print(rank, total.tolist(), [part.tolist() for part in parts], first.tolist(), ring.tolist(), flush=True)


communicate(None)
communicate(pair)
dist.barrier()
try:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 1)
except RuntimeError as error:
    print(rank, str(error)[:60].replace("\n", " "), flush=True)
# Whoever leaves at once can leave the other one inside of its comparison, without an end; rank 0 has the store.
store = dist.distributed_c10d._get_default_store()
store.set(f"through {rank}", "")
store.wait([f"through {1 - rank}"])
if rank == 1:
    store.set("gone", "")
else:
    store.wait(["gone"])
