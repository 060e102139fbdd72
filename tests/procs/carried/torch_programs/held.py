"""Works of every kind that the program holds while it computes, and waits for much later. FOLDER

First all ranks have begun them, then twice only rank 0 has. Each time it waits for a file of FOLDER: 1, 2, 3.
"""

import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(minutes=9))
rank, world = dist.get_rank(), dist.get_world_size()
beside = dist.new_group(list(range(world)))


def mine(*shape, times=1):
    """Values that no other rank has."""
    made = [torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 2) + n for n in range(times)]
    return made if times > 1 else made[0]


# Each gives its works, and tensors that have the result once these are waited for. Rank 0 is no root that sends.


def all_reduce():
    tensor = mine(3, 2).t()
    return dist.all_reduce(tensor, async_op=True), tensor


def all_reduce_beside():
    tensor = mine(5)
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=beside, async_op=True), tensor


def all_reduce_coalesced():
    tensors = mine(3, times=2)
    return dist.all_reduce_coalesced(tensors, async_op=True), *tensors


def broadcast():
    tensor = mine(4)
    return dist.broadcast(tensor, src=1, async_op=True), tensor


def reduce():
    tensor = mine(4)
    work = dist.reduce(tensor, dst=0, async_op=True)
    return work, *([tensor] if rank == 0 else [])


def all_gather():
    into = list(torch.zeros(world, 3))
    return dist.all_gather(into, mine(3), async_op=True), *into


def all_gather_into_tensor():
    into = torch.zeros(2 * world, 3)
    return dist.all_gather_into_tensor(into, mine(2, 3), async_op=True), into


def reduce_scatter():
    into = torch.zeros(3)
    return dist.reduce_scatter(into, [mine(3) + n for n in range(world)], async_op=True), into


def reduce_scatter_tensor():
    into = torch.zeros(2, 3)
    return dist.reduce_scatter_tensor(into, mine(2 * world, 3), async_op=True), into


def gather():
    into = list(torch.zeros(world, 3)) if rank == 0 else None
    return dist.gather(mine(3), into, dst=0, async_op=True), *(into or [])


def scatter():
    into = torch.zeros(3)
    return dist.scatter(into, mine(3, times=world) if rank == 1 else None, src=1, async_op=True), into


def all_to_all():
    into = list(torch.zeros(world, 2))
    return dist.all_to_all(into, mine(2, times=world), async_op=True), *into


def all_to_all_single():
    into = torch.zeros(world * 2)
    return dist.all_to_all_single(into, mine(world * 2), group=beside, async_op=True), into


def barrier():
    return (dist.barrier(async_op=True),)


def isend():
    if rank == 0:
        return (dist.isend(mine(4) + 7, 1, tag=1),)
    into = torch.zeros(4)
    return (dist.irecv(into, 0, tag=1), into) if rank == 1 else ()


def irecv():
    if rank == 1:
        return (dist.isend(mine(4) + 8, 0, tag=2),)
    into = torch.zeros(4)
    return (dist.irecv(into, 1, tag=2), into) if rank == 0 else ()


def batch():
    into = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine(3), (rank + 1) % world, beside),
            dist.P2POp(dist.irecv, into, (rank - 1) % world, beside),
        ]
    )
    return *works, into


def functional_all_reduce():
    return (functional.all_reduce(mine(3), "sum", dist.group.WORLD),)


def functional_all_gather():
    return (functional.all_gather_tensor(mine(3), 0, beside),)


def functional_reduce_scatter():
    return (functional.reduce_scatter_tensor(mine(2 * world), "sum", 0, beside),)


KINDS = [
    *(all_reduce, all_reduce_beside, all_reduce_coalesced, broadcast, reduce, all_gather, all_gather_into_tensor),
    *(reduce_scatter, reduce_scatter_tensor, gather, scatter, all_to_all, all_to_all_single, barrier),
    *(isend, irecv, batch, functional_all_reduce, functional_all_gather, functional_reduce_scatter),
]


FUTURES = (all_reduce_coalesced,)
"""Those that give a future, for whose end a cut waits."""
NEVER_COMPLETED = (isend, irecv, batch, reduce_scatter, reduce_scatter_tensor)
"""Works that do not say so before some thread has waited for them, as gloo has them."""


def begin(without=()):
    return [(kind, kind()) for kind in KINDS if kind not in without]


def wait(work):
    return work.wait()


def wait_within(work):
    return work.wait(timedelta(minutes=8)) if isinstance(work, dist.Work) else work.wait()


def ask(work):
    while not work.is_completed():
        time.sleep(0.001)
    return work.wait()


def wait_for_file(name):
    while not (folder / name).exists():
        time.sleep(0.01)


def hold(number):
    if rank == 0:
        print("held", number, flush=True)
        wait_for_file(str(number))


def end(held, how):
    for kind, parts in held:
        tensors = [each for each in parts if isinstance(each, torch.Tensor)]
        waited = [bool(how(each)) for each in parts if not isinstance(each, torch.Tensor)]
        print(rank, how.__name__, kind.__name__, waited, *(each.tolist() for each in tensors), flush=True)


# All have begun; a thread waits for one of them, and the future of another is held.
held, seen = begin(), []
waiter = threading.Thread(target=lambda: seen.append(held[0][1][0].wait()))
waiter.start()
after = held[1][1][0].get_future().then(lambda done: [each.tolist() for each in done.value()])
hold(1)
dist.barrier(beside)
end(held, wait_within)
waiter.join()
print(rank, "seen", seen, after.wait(), flush=True)

# Only rank 0 has begun; then the others do.
for number, how, without in ((2, wait, FUTURES), (3, ask, FUTURES + NEVER_COMPLETED)):
    dist.barrier(beside)
    if rank != 0:
        wait_for_file(f"others-{number}")
    held = begin(without)
    hold(number)
    (folder / f"others-{number}").touch()
    end(held, how)
dist.barrier()
print("end", rank, flush=True)
dist.destroy_process_group()
