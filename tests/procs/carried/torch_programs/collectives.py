"""A program of chance: every collective, messages, works that are held, groups that come and go. SEED ACTS

All ranks draw the same acts from one seed; each prints a digest of what it got.
"""

import hashlib
import pickle
import random
import sys

import torch
import torch.distributed as dist

seed, num_acts = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
chance = random.Random(seed)
mine = torch.Generator().manual_seed(1000 * seed + rank)
digest = hashlib.sha256()
groups = [dist.group.WORLD]
held = []


def number(*shape):
    return torch.randint(-1000, 1000, shape, generator=mine).to(torch.float64)


def take(*tensors):
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())


def settle(at_most):
    while len(held) > at_most:
        works, tensors = held.pop(0)
        for work in works:
            work.wait()
        take(*tensors)


def all_reduce(group, n, length):
    op = chance.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
    value = number(length)
    held.append(([dist.all_reduce(value, op, group, async_op=True)], [value]))


def broadcast(group, n, length):
    value = number(length)
    held.append(([dist.broadcast(value, group=group, group_src=chance.randrange(n), async_op=True)], [value]))


def all_gather(group, n, length):
    into = [torch.zeros(length, dtype=torch.float64) for _ in range(n)]
    held.append(([dist.all_gather(into, number(length), group, async_op=True)], into))


def all_gather_flat(group, n, length):
    into = torch.zeros(n * length, dtype=torch.float64)
    held.append(([dist.all_gather_single(into, number(length), group, async_op=True)], [into]))


def reduce_scatter_flat(group, n, length):
    into = torch.zeros(length, dtype=torch.float64)
    work = dist.reduce_scatter_single(into, number(n * length), group=group, async_op=True)
    held.append(([work], [into]))


def all_to_all(group, n, length):
    into = torch.zeros(n * length, dtype=torch.float64)
    held.append(([dist.all_to_all_single(into, number(n * length), group=group, async_op=True)], [into]))


def reduce(group, n, length):
    value, root = number(length), chance.randrange(n)
    dist.reduce(value, group=group, group_dst=root)
    if dist.get_group_rank(group, rank) == root:
        take(value)


def gather_and_scatter(group, n, length):
    root = chance.randrange(n)
    is_root = dist.get_group_rank(group, rank) == root
    into = [torch.zeros(length, dtype=torch.float64) for _ in range(n)] if is_root else None
    dist.gather(number(length), into, group=group, group_dst=root)
    back = torch.zeros(length, dtype=torch.float64)
    dist.scatter(back, into, group=group, group_src=root)
    take(back)


def objects(group, n, length):
    found = [None] * n
    dist.all_gather_object(found, {"rank": rank, "value": number(2).tolist()}, group)
    digest.update(pickle.dumps(found))


def barriers(group, n, length):
    dist.barrier(group)
    dist.monitored_barrier(group)


def ring(group, n, length):
    """Receives are posted long before, or long after, what they receive is sent."""
    me = dist.get_group_rank(group, rank)
    into = torch.zeros(length, dtype=torch.float64)
    if n == 1:
        return
    ahead, behind, tag = (me + 1) % n, (me - 1) % n, chance.randrange(3)
    value = number(length)
    acts = [
        lambda: dist.irecv(into, group=group, group_src=behind, tag=tag),
        lambda: dist.isend(value, group=group, group_dst=ahead, tag=tag),
    ]
    works = [act() for act in (acts if chance.random() < 0.5 else acts[::-1])]
    held.append((works, [into]))


def unequal(group, n, length):
    """One sends to all others, who wait for it in the call; who has nothing to do goes on."""
    me, root = dist.get_group_rank(group, rank), chance.randrange(n)
    if me == root:
        for other in range(n):
            if other != root:
                dist.send(number(length), group=group, group_dst=other)
    else:
        into = torch.zeros(length, dtype=torch.float64)
        dist.recv(into, group=group, group_src=root)
        take(into)


def make_group(group, n, length):
    if len(groups) < 5:
        ranks = sorted(chance.sample(range(world), chance.randint(1, world)))
        groups.append(dist.new_group(ranks))


def destroy_group(group, n, length):
    settle(0)
    if len(groups) > 2:
        gone = groups.pop(chance.randrange(1, len(groups)))
        if gone is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(gone)


ACTS = [
    *(all_reduce, broadcast, all_gather, all_gather_flat, reduce_scatter_flat, all_to_all, reduce),
    *(gather_and_scatter, objects, barriers, ring, ring, unequal),
]
for act in range(num_acts):
    what = chance.choice([make_group, destroy_group]) if chance.random() < 0.05 else chance.choice(ACTS)
    group, length, keep = chance.choice(groups), chance.choice([1, 7, 5000]), chance.randrange(6)
    inner = random.Random(chance.random())
    outer, chance = chance, inner
    if what in (make_group, destroy_group):
        what(None, 0, 0)
    elif group is not dist.GroupMember.NON_GROUP_MEMBER:
        what(group, dist.get_world_size(group), length)
    chance = outer
    settle(keep)
    if act % 20 == 19:
        print(rank, act, digest.hexdigest(), flush=True)
settle(0)
print("end", rank, digest.hexdigest(), flush=True)
dist.destroy_process_group()
