"""Time of new weights from a trainer into engines: two hosts of each, shaped links, real TCP.

A trainer under FSDP2 has the tensors of a Hugging Face checkpoint, two engines hold vLLM's fused and sharded ones.
Ours moves shards into these, as a record of the engines' loader has them. The peer does what the engines of vLLM and
verl do by themselves: trainers gather each tensor, and the first one broadcasts all of it to every engine, bucket by
bucket, over the same gloo.

Times are over ``t``, a plain message of the bytes that the busiest NIC has to carry, headers of TCP included. No
broadcast of whole tensors can beat its own bound, all bytes of the model through one NIC, which stands beside. A sync
of a single row is what any takes, whatever its size: ranks agree that it begins, and that it has ended for all.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.report import Row, at_least, at_most, spread_of
from benchmarks.reshard.netns import MAX_LOAD, MAX_T_SPREAD
from benchmarks.reshard.netns_ranks import nic_bytes, plain_message, timed
from remesh.layout.recorded import record
from remesh.resharding import Resharder
from remesh.testbed import BedSpec, HostSpec, Testbed

HOSTS = {"trainer0": 2, "trainer1": 2, "engine0": 1, "engine1": 1}
TRAINERS, ENGINES = [0, 1, 2, 3], [4, 5]
HEADS, KV_HEADS, HEAD = 8, 2, 16
OURS, PEER = "remesh", "all-gather and broadcast"
FIXED = "remesh, of a row to each engine"
_NUM_BUCKETS = 4
_GOAL = 1.10
_TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of the experiment."""

    num_layers: int
    repeat: int
    rate_mbit: int = 100
    width: int = 128
    inner: int = 352
    vocabulary: int = 2048


@dataclass(frozen=True)
class SyncTold:
    """What one rank saw."""

    seconds: dict[str, list[float]]
    nic: dict[str, tuple[int, int]]
    """Bytes sent and received by this rank's host in one sync."""
    wanted_bytes: int
    """Of the parameters that this rank takes."""


def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, sizes.width)}
    for number in range(sizes.num_layers):
        stem = f"model.layers.{number}"
        rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        found |= {f"{stem}.self_attn.{name}_proj.weight": (size, sizes.width) for name, size in rows.items()}
        found[f"{stem}.self_attn.o_proj.weight"] = (sizes.width, HEADS * HEAD)
        found |= {f"{stem}.mlp.{name}_proj.weight": (sizes.inner, sizes.width) for name in ("gate", "up")}
        found[f"{stem}.mlp.down_proj.weight"] = (sizes.width, sizes.inner)
        found[f"{stem}.input_layernorm.weight"] = (sizes.width,)
    return found


def rows(sizes: Sizes) -> list[Row]:
    """The rows of the experiment."""
    hosts = tuple(HostSpec(host, sizes.rate_mbit * 125_000) for host in HOSTS)
    with Testbed(BedSpec(hosts)) as bed:
        told: list[SyncTold] = bed.run(measure, HOSTS, (sizes,), timeout_s=_TIMEOUT_S)
        load = os.getloadavg()[0]
    times = {
        name: [max(run) for run in zip(*(one.seconds[name] for one in told), strict=True)] for name in told[0].seconds
    }
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes_of(sizes).values())
    case = f"sync of {num_bytes / (1 << 20):.0f} MiB to 2 engines"
    t = statistics.median(times["t"])
    spread = {name: spread_of(runs) for name, runs in times.items()}
    over_t = {name: [one / base for one, base in zip(runs, times["t"], strict=True)] for name, runs in times.items()}
    # A machine that is busy with something else says nothing of a bound.
    goal = _GOAL if load <= MAX_LOAD and spread["t"] <= MAX_T_SPREAD else None
    gain = statistics.median(peer / ours for peer, ours in zip(times[PEER], times[OURS], strict=True))
    # Every byte of the model has to leave one NIC, which is as fast as the one that `t` was measured on.
    of_broadcast = t * num_bytes / max(one.wanted_bytes for one in told)
    found = [
        at_most(f"{case}: {OURS}", statistics.median(over_t[OURS]), "x bound", goal, bound=1.0, spread=spread[OURS]),
        Row(f"{case}: {PEER}", statistics.median(over_t[PEER]), "x bound", peer="gloo", spread=spread[PEER]),
        at_least(f"{case}: {PEER} over {OURS}", gain, "ratio", 2.0, peer="gloo"),
        Row(f"{case}: bound of any broadcast over {OURS}", of_broadcast / statistics.median(times[OURS]), "ratio"),
    ]
    for name in (OURS, PEER):
        found.append(Row(f"{case}: seconds, {name}", statistics.median(times[name]), "s"))
        for way, at in (("out of", 0), ("into", 1)):
            for side, ranks in (("trainer", TRAINERS[::2]), ("engine", ENGINES)):
                most = max(told[rank].nic[name][at] for rank in ranks)
                found.append(Row(f"{case}: bytes {way} the busiest {side}'s NIC, {name}", most, "bytes"))
    found.append(Row(f"{case}: seconds, {FIXED}", statistics.median(times[FIXED]), "s"))
    busy = "" if goal else ", too busy for a verdict"
    return [*found, Row(f"{case}: t", t, "s", spread=spread["t"]), Row(f"{case}: load{busy}", load, "load")]


def measure(sizes: Sizes) -> SyncTold:
    """Run both in turn; raises when a bit of an engine is wrong after one."""
    rank, shapes = dist.get_rank(), shapes_of(sizes)
    mesh = DeviceMesh("cpu", TRAINERS)
    among = dist.new_group([TRAINERS[0], *ENGINES])
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    held = {name: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None) for name, one in whole.items()}
    engine = _Engine(rank - ENGINES[0], sizes) if rank in ENGINES else None
    resharder = Resharder()
    row = torch.ones(1, sizes.width)
    wanted_row = {} if engine is None else {"row": torch.zeros(1, sizes.width)}
    held_row = {"row": row} if rank == TRAINERS[0] else {}

    def ours() -> None:
        resharder.reshard({} if engine else held, dict(engine.wanted.pieces) if engine else {})

    def theirs() -> None:
        for names in _buckets(list(shapes)):
            bucket = [torch.empty(shapes[name]) if engine else held[name].full_tensor() for name in names]
            if rank not in (TRAINERS[0], *ENGINES):
                continue
            flat = torch.cat([one.flatten() for one in bucket])
            dist.broadcast(flat, TRAINERS[0], group=among)
            if engine:
                parts = flat.split([one.numel() for one in bucket])
                engine.take({name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)})

    wanted = torch.tensor([engine.num_bytes if engine else 0])
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    plain = plain_message(TRAINERS[0], ENGINES[0], int(wanted))
    runs: dict[str, Callable[[], object]] = {
        "t": plain,
        OURS: ours,
        FIXED: lambda: resharder.reshard(held_row, wanted_row),
        PEER: theirs,
    }
    for act in (runs[OURS], runs[FIXED]):
        act()  # plans
    told = SyncTold({name: [] for name in runs}, {}, engine.num_bytes if engine else 0)
    for turn in range(sizes.repeat):
        for name, act in runs.items():
            if engine:
                engine.clear()
            before = nic_bytes()
            told.seconds[name].append(timed(act))
            if turn == 0:
                dist.barrier()
                told.nic[name] = tuple(after - was for after, was in zip(nic_bytes(), before, strict=True))  # type: ignore[assignment]
            if engine and name in (OURS, PEER):
                engine.check(whole, name)
    return told


def _buckets(names: list[str]) -> list[list[str]]:
    length = -(-len(names) // _NUM_BUCKETS)
    return [names[at : at + length] for at in range(0, len(names), length)]


class _Engine:
    """One rank of two, with vLLM's parameters, and the loader that cuts whole tensors for the peer."""

    def __init__(self, number: int, sizes: Sizes) -> None:
        self.number = number
        size, rows = len(ENGINES), (HEADS + 2 * KV_HEADS) * HEAD
        self.parameters = {"model.embed_tokens.weight": torch.zeros(sizes.vocabulary // size, sizes.width)}
        for layer in range(sizes.num_layers):
            stem = f"model.layers.{layer}"
            self.parameters |= {
                f"{stem}.self_attn.qkv_proj.weight": torch.zeros(rows // size, sizes.width),
                f"{stem}.self_attn.o_proj.weight": torch.zeros(sizes.width, HEADS * HEAD // size),
                f"{stem}.mlp.gate_up_proj.weight": torch.zeros(2 * sizes.inner // size, sizes.width),
                f"{stem}.mlp.down_proj.weight": torch.zeros(sizes.width, sizes.inner // size),
                f"{stem}.input_layernorm.weight": torch.zeros(sizes.width),
            }
        self.wanted = record(self._load, shapes_of(sizes), self.parameters).bind(self.parameters)
        self.num_bytes = sum(one.nbytes for one in self.parameters.values())

    def clear(self) -> None:
        """Forget the weights."""
        for one in self.parameters.values():
            one.zero_()

    def take(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Cut whole tensors and put the parts where they belong."""
        self._load(whole, self.parameters)

    def _load(self, whole: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in whole.items():
            target, start = self._place_of(name, into)
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            part = tensor if "norm" in name else tensor.chunk(len(ENGINES), dim)[self.number]
            target.narrow(0, start, part.shape[0]).copy_(part)

    def check(self, whole: Mapping[str, torch.Tensor], contestant: str) -> None:
        """See that every parameter is what the loader would have made of whole tensors."""
        found = {name: one.clone() for name, one in self.parameters.items()}
        self.take(whole)
        if not all(found[name].equal(one) for name, one in self.parameters.items()):
            raise AssertionError(f"{contestant} left wrong bits in an engine")

    def _place_of(self, name: str, into: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        size = len(ENGINES)
        for names, fused, starts in (
            (("q_proj", "k_proj", "v_proj"), "qkv_proj", (0, HEADS * HEAD // size, (HEADS + KV_HEADS) * HEAD // size)),
            (("gate_proj", "up_proj"), "gate_up_proj", (0, None)),
        ):
            for one, start in zip(names, starts, strict=True):
                if f".{one}." in name:
                    target = into[name.replace(one, fused)]
                    return target, len(target) // 2 if start is None else start
        return into[name], 0
