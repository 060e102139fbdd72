"""Every public function of torch.distributed, with arguments of chance; each rank prints what came of it. SEED ROUNDS

What raises prints the kind of its error. Ranks draw the same calls from one seed; only values differ.
"""

import hashlib
import random
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
seed, num_rounds = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(minutes=9))
rank, world = dist.get_rank(), dist.get_world_size()
chance = random.Random(seed)
mine = torch.Generator().manual_seed(1000 * seed + rank)
store = _get_default_store()
groups = [dist.group.WORLD, dist.new_group(list(range(world))), dist.new_group([0, 1])]
KINDS = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.bool, torch.complex64),
]
OPS = [getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")]
SHAPES = [(), (1,), (0,), (3,), (2, 3), (40, 50)]
NUMBER = 0


def value(kind, shape):
    made = torch.randint(0, 5, shape, generator=mine).to(kind)
    way = chance.randrange(5)
    if way == 0 and len(shape) == 2:
        return made.t()
    if way == 1 and len(shape) == 2:
        return torch.cat([made, made], 1)[:, : shape[1]]
    if way == 2 and kind.is_floating_point:
        return made.requires_grad_(True)
    return made


def draw():
    return value(chance.choice(KINDS), chance.choice(SHAPES))


def zeros(like, *, times=1):
    return [torch.zeros_like(like, requires_grad=False) for _ in range(times)]


def told(found):
    """What is printed of a value: tensors by their bits."""
    if isinstance(found, torch.Tensor):
        found = found.detach()
        bits = found.contiguous().reshape(-1).view(torch.uint8) if found.numel() else found.reshape(-1).to(torch.uint8)
        digest = hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:8]
        return f"{str(found.dtype)[6:]}{list(found.shape)}:{digest}"
    if isinstance(found, (list, tuple)):
        return "[" + ", ".join(map(told, found)) + "]"
    if isinstance(found, (dist.Work, dist.ProcessGroup)):
        return "work" if isinstance(found, dist.Work) else "group"
    return repr(found)


def waited(work, *tensors):
    """What a work says of itself, and what is in the tensors then."""
    if work is None:
        return [None, *tensors]
    if chance.random() < 0.2:
        return [work.wait(timedelta(seconds=500)), work.wait(), work.is_completed(), *tensors]
    if chance.random() < 0.2:
        return [work.wait(), work.is_success(), work.exception(), *tensors]
    return [work.wait(), *tensors]


def by_future(work, *tensors):
    after = work.get_future().then(lambda done: [each.sum() for each in done.value()])
    return [after.wait(), *tensors]


# --- collectives ---


def all_reduce(group, n):
    tensor, is_async = draw(), chance.random() < 0.5
    work = dist.all_reduce(tensor, chance.choice(OPS), group, is_async)
    return by_future(work, tensor) if is_async and chance.random() < 0.3 else waited(work, tensor)


def all_reduce_coalesced(group, n):
    tensors = [value(torch.float32, chance.choice(SHAPES)) for _ in range(chance.randint(1, 3))]
    return waited(dist.all_reduce_coalesced(tensors, group=group, async_op=chance.random() < 0.5), *tensors)


def broadcast(group, n):
    tensor = draw()
    where = {"src": chance.randrange(n)} if chance.random() < 0.5 else {"group_src": chance.randrange(n)}
    return waited(dist.broadcast(tensor, group=group, async_op=chance.random() < 0.5, **where), tensor)


def reduce(group, n):
    tensor, root = draw(), chance.randrange(n)
    work = dist.reduce(tensor, op=chance.choice(OPS), group=group, async_op=chance.random() < 0.5, group_dst=root)
    return waited(work, *([tensor] if rank == root else []))


def all_gather(group, n):
    tensor = draw()
    into = zeros(tensor, times=n)
    return waited(dist.all_gather(into, tensor, group, async_op=chance.random() < 0.5), *into)


def all_gather_coalesced(group, n):
    tensors = [value(torch.float32, (2,)), value(torch.float32, (3,))]
    into = [[torch.zeros_like(each) for each in tensors] for _ in range(n)]
    return waited(dist.all_gather_coalesced(into, tensors, group, chance.random() < 0.5), into)


def all_gather_into(group, n):
    tensor = value(chance.choice(KINDS), (3, 2)).detach().contiguous()
    into = torch.zeros(3 * n, 2, dtype=tensor.dtype)
    call = chance.choice([dist.all_gather_into_tensor, dist.all_gather_single])
    return waited(call(into, tensor, group=group, async_op=chance.random() < 0.5), into)


def reduce_scatter(group, n):
    tensors = [value(torch.float32, (3,)).detach() for _ in range(n)]
    into = torch.zeros(3)
    op = chance.choice(OPS)
    return waited(dist.reduce_scatter(into, tensors, op, group, chance.random() < 0.5), into)


def reduce_scatter_into(group, n):
    tensor = value(chance.choice(KINDS), (2 * n, 3)).detach().contiguous()
    into = torch.zeros(2, 3, dtype=tensor.dtype)
    call = chance.choice([dist.reduce_scatter_tensor, dist.reduce_scatter_single])
    return waited(call(into, tensor, op=chance.choice(OPS), group=group, async_op=chance.random() < 0.5), into)


def gather(group, n):
    tensor, root = draw(), chance.randrange(n)
    into = zeros(tensor, times=n) if rank == root else None
    return waited(dist.gather(tensor, into, group=group, async_op=chance.random() < 0.5, group_dst=root), into)


def scatter(group, n):
    tensor, root = draw().detach(), chance.randrange(n)
    given = [tensor + i if tensor.dtype != torch.bool else tensor for i in range(n)] if rank == root else None
    into = zeros(tensor)[0]
    return waited(dist.scatter(into, given, group=group, async_op=chance.random() < 0.5, group_src=root), into)


def all_to_all(group, n):
    given = [value(torch.float32, (2,)).detach() for _ in range(n)]
    into = [torch.zeros(2) for _ in range(n)]
    return waited(dist.all_to_all(into, given, group, chance.random() < 0.5), *into)


def all_to_all_single(group, n):
    counts = [[chance.randrange(4) for _ in range(n)] for _ in range(n)]
    me = dist.get_group_rank(group, rank)
    gives, takes = counts[me], [row[me] for row in counts]
    given, into = value(torch.float64, (sum(gives),)).detach(), torch.zeros(sum(takes), dtype=torch.float64)
    return waited(dist.all_to_all_single(into, given, takes, gives, group, chance.random() < 0.5), into)


def barriers(group, n):
    if chance.random() < 0.3:
        return dist.monitored_barrier(group, timedelta(seconds=500), wait_all_ranks=chance.random() < 0.5)
    return waited(dist.barrier(group, async_op=chance.random() < 0.5))


def objects(group, n):
    gathered, scattered, root = [None] * n, [None], chance.randrange(n)
    dist.all_gather_object(gathered, {"rank": rank, "what": (1, "two")}, group)
    back = [None] * n if rank == root else None
    dist.gather_object((rank, "x" * chance.randrange(9)), back, group=group, group_dst=root)
    sent = [rank, {"from": root}] if rank == root else [None, None]
    dist.broadcast_object_list(sent, group=group, group_src=root)
    dist.scatter_object_list(scattered, list(range(n)) if rank == root else None, group=group, group_src=root)
    return [gathered, back, sent, scattered]


def coalesced(group, n):
    tensors = [value(torch.float32, (3,)).detach() for _ in range(2)]
    with _coalescing_manager(group, async_ops=chance.random() < 0.5) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return [*waited(manager.works[-1] if getattr(manager, "works", None) else None), *tensors]


def functional_ones(group, n):
    tensor = value(torch.float32, (2 * n, 3)).detach().contiguous()
    names = list(range(n)) if group is dist.group.WORLD else group
    call = chance.choice(
        [
            lambda: functional.all_reduce(tensor, chance.choice(["sum", "avg", "max"]), names),
            lambda: functional.all_gather_tensor(tensor, chance.randrange(2), names),
            lambda: functional.reduce_scatter_tensor(tensor, "sum", 0, names),
            lambda: functional.all_to_all_single(tensor, None, None, names),
            lambda: functional.broadcast(tensor, 0, names),
            lambda: functional.all_reduce_coalesced([tensor, tensor + 1], "sum", names),
            lambda: functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], names),
            lambda: functional.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], names),
            lambda: functional.all_reduce_inplace(tensor, "sum", names),
            lambda: functional.all_gather_tensor_autograd(tensor, 0, names),
            lambda: functional.permute_tensor(tensor, [*range(1, n), 0], names),
        ]
    )
    found = call()
    return [each + 0 for each in found] if isinstance(found, (list, tuple)) else found + 0


def differentiated(group, n):
    tensor = torch.rand(n, 2, generator=mine).requires_grad_(True)
    calls = [
        lambda: with_gradients.all_reduce(tensor, group=group),
        lambda: torch.stack(with_gradients.all_gather(tensor, group=group)),
        lambda: with_gradients.broadcast(tensor, 0, group=group),
        lambda: with_gradients.reduce(tensor, 0, group=group),
        lambda: with_gradients.reduce_scatter(torch.zeros(2), list(tensor.unbind()), group=group),
        lambda: torch.stack(with_gradients.all_to_all([torch.zeros(2)] * n, list(tensor.unbind()), group=group)),
    ]
    found = chance.choice(calls)()
    (found * found).sum().backward()
    return [found, tensor.grad]


# --- messages ---


def messages(group, n):
    me = dist.get_group_rank(group, rank)
    out, into = torch.full((3,), float(me)), torch.zeros(3)
    ahead, behind, tag = (me + 1) % n, (me - 1) % n, chance.randrange(3)
    ops = [
        dist.P2POp(dist.isend, out, group=group, tag=tag, group_peer=ahead),
        dist.P2POp(dist.irecv, into, group=group, tag=tag, group_peer=behind),
    ]
    for work in dist.batch_isend_irecv(ops if chance.random() < 0.5 else ops[::-1]):
        work.wait()
    return into


def from_anybody(group, n):
    if rank:
        return dist.send(torch.tensor([rank]), 0, group)
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(n - 1)]
    sources = [dist.recv(each, group=group) for each in found]
    return [sorted(int(each) for each in found), sorted(sources)]


def object_messages(group, n):
    if rank == 0:
        return dist.send_object_list([{"a": 1}, "b"], group=group, group_dst=1)
    found = [None, None]
    return [dist.recv_object_list(found, group=group, group_src=0), found] if rank == 1 else None


# --- groups ---


def described(group, n):
    return [
        *(dist.get_backend(group), dist.get_backend_config(group), dist.get_process_group_ranks(group)),
        *(dist.get_world_size(group), dist.get_rank(group), dist.get_global_rank(group, n - 1), dist.is_initialized()),
        *(group.size(), group.rank(), group.name(), group.group_name, group.group_desc, group.bound_device_id),
        *(dist.get_pg_count(), isinstance(group, dist.ProcessGroup)),
        *(group._has_hooks(), dist.get_node_local_rank(7), dist.is_torchelastic_launched()),
    ]


def from_the_group(group, n):
    """Methods of the group, as libraries call them."""
    tensor = value(torch.float32, (3,)).detach()
    calls = [
        lambda: waited(group.allreduce(tensor), tensor),
        lambda: waited(group.allreduce([tensor], dist.ReduceOp.MAX), tensor),
        lambda: waited(group.broadcast(tensor, 0), tensor),
        lambda: waited(group.barrier()),
        lambda: waited(group.allgather([[torch.zeros(3) for _ in range(n)]], [tensor])),
        lambda: waited(group.reduce(tensor, 0)) and None,
        lambda: waited(group.allreduce([tensor], timeout=timedelta(seconds=300)), tensor),
    ]
    return chance.choice(calls)()


def of_the_backend(group, n):
    tensor = value(torch.float32, (3,)).detach()
    backend = group._get_backend(torch.device("cpu"))
    return waited(backend.allreduce([tensor]), tensor)


def new_groups(group, n):
    ways = [
        lambda: dist.new_group([0, 1], timeout=timedelta(seconds=500)),
        lambda: dist.new_group(group_desc="described"),
        lambda: dist.new_group([world - 1]),
        lambda: dist.new_group(list(range(world)), use_local_synchronization=True),
        lambda: dist.new_group(list(range(world)), backend="gloo"),
        lambda: dist.new_subgroups(1)[0],
        lambda: dist.new_subgroups_by_enumeration([[0, 1], list(range(2, world))][: 1 + (world > 2)])[0],
    ]
    made = chance.choice(ways)()
    tensor = torch.ones(2)
    if made is not None and made is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(tensor, group=made)
        found = [tensor, made.group_desc, dist.get_process_group_ranks(made)]
        dist.destroy_process_group(made)
        return found
    return None


def meshes(group, n):
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=mesh.get_group("b"))
    return [tensor, mesh.get_coordinate(), mesh["b"].size()]


def timed(group, n):
    """A timeout is set where torch sets it; nothing that is heard of it here."""
    tensor = torch.ones(2)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=400), group)
    dist.all_reduce(tensor, group=group)
    return tensor


def refused(group, n):
    ways = [
        lambda: dist.split_group(group, [[0, 1]]),
        lambda: dist.shrink_group([world - 1]),
        lambda: dist.all_reduce(torch.eye(2).to_sparse(), group=group),
        lambda: dist.all_reduce([torch.ones(1)], group=group),
        lambda: dist.broadcast(torch.ones(1), world + 3, group=group),
        lambda: dist.all_gather([torch.zeros(1)], torch.ones(2), group=group),
        lambda: dist.init_process_group("gloo"),
        lambda: dist.get_backend("nobody"),
    ]
    return chance.choice(ways)()


# --- the store ---


def kept_in_store(group, n):
    key = f"{NUMBER}/{rank}"
    store.set(key, "one")
    found = [
        store.get(key),
        store.add(f"{key}/n", 3),
        store.add(f"{key}/n", -1),
        store.check([key]),
        store.check([key, "no"]),
    ]
    found += [store.compare_set(key, "one", "two"), store.compare_set(key, "one", "three"), store.delete_key(key)]
    store.multi_set([key, f"{key}/b"], ["x", "y"])
    found += [store.multi_get([key, f"{key}/b"]), store.append(key, "z"), store.get(key), store.wait([key])]
    return [*found, store.has_extended_api(), dist.PrefixStore(key, store).check(["b"])]


def not_in_store(group, n):
    try:
        return store.wait([f"{NUMBER}/nobody"], timedelta(milliseconds=30))
    except dist.DistStoreError:
        return "timeout"


def impatient_store(group, n):
    before = store.timeout
    store.set_timeout(timedelta(milliseconds=30))
    try:
        return store.get(f"{NUMBER}/nobody")
    except dist.DistStoreError:
        return "timeout"
    finally:
        store.set_timeout(before)


def met_at_store(group, n):
    return store.barrier(f"{NUMBER}/barrier", world)


def shared_in_store(group, n):
    name = f"{NUMBER}/shared"
    if rank == 0:
        store.set(name, str(NUMBER))
    return [store.get(name), int(dist.PrefixStore("p", store).add(name, 1)) <= world]


# --- what is built of them ---


def uneven_steps(group, n):
    torch.manual_seed(NUMBER)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for step in range(2 + rank):
            model(torch.full((1, 3), float(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def not_in_step(group, n):
    torch.manual_seed(NUMBER)
    model = DistributedDataParallel(torch.nn.Linear(3, 2), static_graph=chance.random() < 0.5)
    with model.no_sync():
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
    model(torch.full((1, 3), rank + 2.0)).sum().backward()
    return [each.grad for each in model.parameters()]


CALLS = [
    *(all_reduce, all_reduce, all_reduce_coalesced, broadcast, reduce, all_gather, all_gather_coalesced),
    *(all_gather_into, reduce_scatter, reduce_scatter_into, gather, scatter, all_to_all, all_to_all_single, barriers),
    *(objects, coalesced, functional_ones, functional_ones, differentiated, messages, from_anybody, object_messages),
    *(described, from_the_group, of_the_backend, new_groups, meshes, timed, refused, kept_in_store, not_in_store),
    *(impatient_store, met_at_store, shared_in_store, uneven_steps, not_in_step),
]
OF_THE_WORLD = {met_at_store, new_groups, meshes, refused, uneven_steps, not_in_step, shared_in_store, kept_in_store}
for _ in range(num_rounds):
    for call in chance.sample(CALLS, len(CALLS)):
        NUMBER += 1
        group, outer = chance.choice(groups), chance
        chance = random.Random(outer.random())
        if call in OF_THE_WORLD:
            group = dist.group.WORLD
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            try:
                said = told(call(group, dist.get_world_size(group)))
            except Exception as error:
                said = type(error).__name__
                if "--errors" in sys.argv:
                    said += f" {error}"
            print(rank, NUMBER, call.__name__, said, flush=True)
        chance = outer
print("end", rank, flush=True)
dist.destroy_process_group()
