"""Tensors between ranks and their devices, beside all-gather and broadcast, against plain sends of the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import remesh
from benchmarks.gpu.bench_rank import BenchRank, Compared, NotRun
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece

_GB = 1e9
_SHAPES = {"8B": (32, 4096, 14336), "30B": (48, 6144, 16384)}
"""Layers, width and inner width of the tensors that have nearly all of the weights."""
_TENSORS_OF_A_LAYER = 3
_MOST_GATHERED_BYTES = 32 << 30
"""What an all-gather of the whole tensor may take on each device."""
_SENT_AT_ONCE_BYTES = 1 << 30
"""A plain send is cut into such parts, so that it needs little memory beside what is measured."""


def reshard(place: BenchRank) -> Compared:
    """Each rank has rows and wants columns."""
    need_ranks(place, 2)
    whole_bytes = min(place.state_bytes * place.world_size, _MOST_GATHERED_BYTES)
    _need_memory(place, whole_bytes + 3 * whole_bytes // place.world_size)
    side = int((whole_bytes // 2) ** 0.5) // place.world_size * place.world_size
    give = _part(place.rank, place.world_size, 0, (side, side), place.device)
    take = _part(place.rank, place.world_size, 1, (side, side), place.device)
    ours = place.seconds(lambda: remesh.reshard({"w": give}, {"w": take}, group=place.network))
    whole = [torch.empty_like(give.tensor) for _ in range(place.world_size)]
    gather = place.seconds(lambda: dist.all_gather(whole, give.tensor, group=place.network))
    sent = give.tensor.nbytes * (place.world_size - 1) // place.world_size
    plain = _plain_send_s(place, sent)
    return Compared(
        "", give.tensor.nbytes / ours / _GB, "all_gather", give.tensor.nbytes / gather / _GB, "sends in a ring",
        give.tensor.nbytes / plain / _GB,
    )  # fmt: skip


def sync_8b(place: BenchRank) -> Compared:
    """The weights of a model of eight billion, from the first half of the ranks to the second."""
    return _sync(place, *_SHAPES["8B"])


def sync_30b(place: BenchRank) -> Compared:
    """The same for thirty billion."""
    return _sync(place, *_SHAPES["30B"])


def _sync(place: BenchRank, num_layers: int, width: int, inner: int) -> Compared:
    """Trainers hold rows, generators want columns; every tensor of a layer is a third of its weights."""
    need_ranks(place, 2)
    if place.is_small:
        num_layers, width, inner = 2, width // 64, inner // 64
    half = place.world_size // 2
    is_trainer = place.rank < half
    held = 2 * _TENSORS_OF_A_LAYER * num_layers * width * inner * (1 if is_trainer else 2) // half
    _need_memory(place, held + 2 * _SENT_AT_ONCE_BYTES)
    names = [f"{layer}.{number}" for layer in range(num_layers) for number in range(_TENSORS_OF_A_LAYER)]
    share: Callable[[int], Piece] = lambda dim: _part(place.rank % half, half, dim, (inner, width), place.device)  # noqa: E731
    give = {name: share(0) for name in names} if is_trainer else {}
    take = {name: share(1) for name in names} if half <= place.rank < 2 * half else {}
    refit = remesh.Refit(take, group=place.network)
    versions = iter(range(1, 100))
    ours = place.seconds(lambda: refit.push(give, next(versions)))
    whole = torch.empty((inner, width), dtype=torch.bfloat16, device=place.device)
    broadcast = place.seconds(lambda: [dist.broadcast(whole, 0, group=place.network) for _ in names])
    plain = _plain_send_s(place, len(names) * whole.nbytes // half)
    return Compared("", ours, "a broadcast of every tensor", broadcast, "sends in a ring", plain)


def _part(index: int, num_parts: int, dim: int, shape: tuple[int, int], device: torch.device) -> Piece:
    start, stop = [0, 0], list(shape)
    start[dim], stop[dim] = (each * shape[dim] // num_parts for each in (index, index + 1))
    box = Box(tuple(start), tuple(stop))
    return Piece(torch.ones(box.shape, dtype=torch.bfloat16, device=device), shape, (Shard(0, box),))


def _plain_send_s(place: BenchRank, num_bytes: int) -> float:
    """Every rank sends so many bytes to the next one, and receives as many."""
    most = min(num_bytes, _SENT_AT_ONCE_BYTES)
    give, take = (torch.zeros(most, dtype=torch.uint8, device=place.device) for _ in range(2))
    right, left = (place.rank + 1) % place.world_size, (place.rank - 1) % place.world_size

    def send() -> None:
        for at in range(0, num_bytes, most):
            size = min(most, num_bytes - at)
            leaving = dist.P2POp(dist.isend, give[:size], right, place.network)
            arriving = dist.P2POp(dist.irecv, take[:size], left, place.network)
            for work in dist.batch_isend_irecv([leaving, arriving]):
                work.wait()

    return place.seconds(send)


def need_ranks(place: BenchRank, least: int) -> None:
    """Raise `NotRun` where there are fewer."""
    if place.world_size < least:
        raise NotRun(f"needs {least} ranks, found {place.world_size}")


def _need_memory(place: BenchRank, num_bytes: int) -> None:
    """All ranks alike: one that has too little speaks for all."""
    free = 1 << 62 if place.is_small else torch.cuda.mem_get_info(place.device)[0]
    lacks = torch.tensor(int(free < 1.2 * num_bytes))
    dist.all_reduce(lacks, dist.ReduceOp.MAX)
    if lacks.item():
        raise NotRun(f"needs {num_bytes / _GB:.0f} GB of free device memory on each rank; take more ranks")
