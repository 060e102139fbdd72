"""One rank computes while all others are inside of collectives of every kind that can begin anew. FILE

It goes on once the file is there.
"""

import hashlib
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

LENGTH = 5000
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
LATE = world - 1
mine = torch.Generator().manual_seed(rank)


def number(*shape):
    return torch.randn(*shape, generator=mine)


def begin(kind, group):
    """The work, and what is to be looked at after it."""
    n = dist.get_world_size(group)
    value, whole, parts = number(LENGTH), number(n * LENGTH), [torch.zeros(LENGTH) for _ in range(n)]
    root = dist.get_group_rank(group, LATE)
    match kind:
        case "barrier":
            return dist.barrier(group, async_op=True), []
        case "all_reduce":
            return dist.all_reduce(value, group=group, async_op=True), [value]
        case "all_gather":
            return dist.all_gather(parts, value, group, async_op=True), parts
        case "all_gather_single":
            return dist.all_gather_single(whole, value, group, async_op=True), [whole, value]
        case "reduce_scatter":
            return dist.reduce_scatter_single(value, whole, group=group, async_op=True), [value, whole]
        case "all_to_all":
            return dist.all_to_all_single(torch.zeros(n * LENGTH), whole, group=group, async_op=True), [whole]
        case "broadcast":
            return dist.broadcast(value, group=group, group_src=root, async_op=True), [value]
        case "scatter":
            given = [number(LENGTH) for _ in range(n)] if rank == LATE else None
            return dist.scatter(value, given, group=group, group_src=root, async_op=True), [value]
        case "reduce":
            seen = [value] if rank == 0 else []
            return dist.reduce(value, group=group, group_dst=0, async_op=True), seen
        case "gather":
            into = parts if rank == 0 else None
            return dist.gather(value, into, group=group, group_dst=0, async_op=True), into or []


FOR_TWO = ("reduce", "gather")
KINDS = (
    *("barrier", "all_reduce", "all_gather", "all_gather_single", "reduce_scatter", "all_to_all", "broadcast"),
    *("scatter", *FOR_TWO),
)
groups = {kind: dist.new_group([0, LATE] if kind in FOR_TWO else None) for kind in KINDS}
if rank == LATE:
    print("computes", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.001)
begun = {kind: begin(kind, group) for kind, group in groups.items() if group is not dist.GroupMember.NON_GROUP_MEMBER}
# A second collective of a group, behind the first.
behind = number(LENGTH)
last = dist.all_reduce(behind, group=groups["all_reduce"], async_op=True)
if rank != LATE:
    print("inside", rank, flush=True)
aside = threading.Thread(target=begun["all_to_all"][0].wait)
aside.start()
while not begun["broadcast"][0].is_completed():
    time.sleep(0.001)
for work, _ in begun.values():
    work.wait()
last.wait()
aside.join()
for kind, (_, tensors) in begun.items():
    print("end", rank, kind, hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest())
print("end", rank, hashlib.sha256(behind.numpy().tobytes()).hexdigest(), flush=True)
dist.destroy_process_group()
