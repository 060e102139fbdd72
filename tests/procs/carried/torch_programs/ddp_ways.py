"""The ways of torch itself to train data-parallel, with arguments of chance: a few steps, then digests. SEED ROUNDS

What raises prints the kind of its error. Ranks draw the same ways from one seed; only their samples differ.
"""

import contextlib
import hashlib
import random
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

warnings.simplefilter("ignore")
WIDTH, STEPS = 12, 3
seed, num_rounds = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)


class Sometimes(nn.Module):
    """One of two layers in turn, buffers, and a gradient that comes twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.turns = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.taken = 0

    def forward(self, x):
        self.taken += 1
        hidden = self.first(self.norm(self.first(x)))
        return self.turns[self.taken % 2](hidden).square().mean()


def plain_model():
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def sample(step):
    made = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=made)


def train(model, optimizer, *, steps=STEPS, after=None):
    for step in range(steps):
        loss = model(sample(step))
        (loss if loss.dim() == 0 else loss.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after([*model.parameters()])
    return digest(model)


def digest(model):
    found = hashlib.sha256()
    for value in [*model.parameters(), *model.buffers()]:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, **more)


def with_options():
    options = chance.choice(
        [
            {"find_unused_parameters": True},
            {"static_graph": True, "find_unused_parameters": chance.random() < 0.5},
            {"gradient_as_bucket_view": True},
            {"bucket_cap_mb": 0.0001},
            {"broadcast_buffers": False},
            {"process_group": dist.new_group(timeout=timedelta(seconds=400))},
            {"init_sync": False},
            {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))},
        ]
    )
    built = Sometimes() if options.get("find_unused_parameters") and "static_graph" not in options else plain_model()
    for each in built.parameters():
        dist.broadcast(each.data, 0)
    model = DistributedDataParallel(built, **options)
    return [*options, train(model, sgd(model)), sorted(model._get_ddp_logging_data())[:3]]


def with_hook():
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    name, hook, state = chance.choice(
        [
            ("allreduce", default_hooks.allreduce_hook, None),
            ("fp16", default_hooks.fp16_compress_hook, None),
            ("noop", debugging_hooks.noop_hook, None),
            ("power", powerSGD_hook.powerSGD_hook, state),
            ("batched", powerSGD_hook.batched_powerSGD_hook, state),
            ("power16", default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), state),
            ("quantized", quantization_hooks.quantization_pertensor_hook, dist.group.WORLD),
        ]
    )
    model = DistributedDataParallel(plain_model(), bucket_cap_mb=chance.choice([0.0005, 25]))
    model.register_comm_hook(state, hook)
    return [name, train(model, sgd(model), steps=4)]


def with_own_hook():
    """As users write them: a chain of futures that ends in another collective."""

    def hook(group, bucket):
        flat = bucket.buffer()
        half = dist.all_reduce(flat[: flat.numel() // 2], async_op=True).get_future()

        def rest(done):
            dist.all_reduce(flat[flat.numel() // 2 :])
            return flat.div_(dist.get_world_size())

        return half.then(rest)

    model = DistributedDataParallel(plain_model())
    model.register_comm_hook(None, hook)
    return train(model, sgd(model))


def local_sgd():
    model = DistributedDataParallel(plain_model())
    inner = dist.new_subgroups(1)[0]
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, inner, start_localSGD_iter=1), post_localSGD_hook.post_localSGD_hook
    )
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    return train(model, PostLocalSGDOptimizer(sgd(model), averager), steps=5)


def averaged():
    model = plain_model()
    groups = {2: dist.get_world_size()}
    averager = HierarchicalModelAverager(groups, 1) if chance.random() < 0.5 else PeriodicModelAverager(2, 1)
    return train(model, sgd(model), steps=5, after=averager.average_parameters)


def zero():
    as_view, overlaps = chance.random() < 0.5, chance.random() < 0.5
    model = DistributedDataParallel(plain_model(), gradient_as_bucket_view=overlaps)
    if not overlaps:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_view, lr=0.01
        )
        found = train(model, optimizer)
        optimizer.consolidate_state_dict(0)
        whole = len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else None
        return [as_view, found, whole]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01)
    wrap = chance.choice([ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved])
    model.register_comm_hook(None, wrap(default_hooks.allreduce_hook, model, optimizer))
    return [wrap.__name__, train(model, optimizer, steps=5)]


def uneven():
    model = DistributedDataParallel(plain_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    with Join([model, optimizer]):
        return train(model, optimizer, steps=2 + dist.get_rank())


def uneven_that_throws():
    model = DistributedDataParallel(plain_model())
    try:
        with model.join(throw_on_early_termination=True):
            train(model, sgd(model), steps=2 + dist.get_rank())
    except RuntimeError:
        return "stopped"
    return "went on"


def accumulated():
    model = DistributedDataParallel(plain_model())
    optimizer = sgd(model)
    for step in range(6):
        with model.no_sync() if step % 3 else contextlib.nullcontext():
            model(sample(step)).square().mean().backward()
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)


def recurrent():
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.LSTM(WIDTH, 5))
    optimizer = sgd(model)
    for step in range(STEPS):
        whole = sample(step)
        packed = pack_sequence([whole[: 4 - dist.get_rank() % 2], whole[:2]], enforce_sorted=False)
        model(packed)[0].data.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def fsdp_of_old():
    strategy = chance.choice([ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
    model = FullyShardedDataParallel(
        plain_model(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=chance.random() < 0.5
    )
    optimizer = sgd(model)
    for step in range(STEPS):
        model(sample(step)).square().mean().backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    return [strategy.name, norm.item().hex(), digest_of_state(state)]


def digest_of_state(state):
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    wide = WIDTH * dist.get_world_size()
    model = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = sgd(model)
    torch.manual_seed(7)
    for _ in range(STEPS):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def compiled():
    model = DistributedDataParallel(plain_model())
    optimizer = sgd(model)
    return train(torch.compile(model, backend="eager"), optimizer)


WAYS = [
    *(with_options, with_options, with_options, with_hook, with_hook, with_hook, with_own_hook, local_sgd, averaged),
    *(zero, zero, uneven, uneven_that_throws, accumulated, recurrent, fsdp_of_old, tensor_parallel, compiled),
]


@record
def main():
    global chance
    dist.init_process_group("gloo", timeout=timedelta(minutes=9))
    number = 0
    for _ in range(num_rounds):
        for way in chance.sample(WAYS, len(WAYS)):
            number += 1
            outer, chance = chance, random.Random(chance.random())
            try:
                said = way()
            except Exception as error:
                said = type(error).__name__
                if "--errors" in sys.argv:
                    said += f" {error}"
            print(dist.get_rank(), number, way.__name__, said, flush=True)
            chance = outer
    print("end", dist.get_rank(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
