"""Ranks of a timed move: they run every contestant in turn, many times, and report when they were done.

All ranks begin at an agreed time of the machine's one clock, and the move is over when the last of them is done.
Contestants take turns, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from remesh.layout import Layout, Shard
from remesh.layout.from_torch import Piece, torch_dtype
from remesh.resharding import TensorMove, plan_reshard, run_plan
from remesh.resharding.planning.transfer import Transfer

_LEAD_S = 0.03
"""How long after it was agreed a run begins: everybody knows by then."""


@dataclass(frozen=True)
class Work:
    """What the ranks of one case are to run."""

    moves: Sequence[TensorMove]
    host_of: Mapping[int, str]
    plans: Mapping[str, Transfer]
    """What is planned before the clock starts, by the name of the contestant."""
    reference: tuple[int, int, int]
    """Giver, taker and bytes of the plain message that everything is measured by."""
    broadcast: str = ""
    """Name of a contestant that is the backend's own broadcast from rank 0; empty for none."""
    one_by_one: str = ""
    """Name of a contestant that plans and runs every tensor by itself; empty for none."""
    repeat: int = 3


@dataclass(frozen=True)
class Told:
    """What one rank saw."""

    seconds: dict[str, list[float]]
    """By contestant, of each run, until this rank was done; the plain message is called ``t``."""
    nic: dict[str, tuple[int, int]]
    """By contestant, bytes sent and received by this rank's host in its first run."""


def measure(work: Work) -> Told:
    """Run all contestants; raises when a bit is wrong after one."""
    rank = dist.get_rank()
    give = _pieces([(move.name, move.src) for move in work.moves], rank)
    take = _pieces([(move.name, move.dst) for move in work.moves], rank)
    for piece in give.values():
        _fill(piece)
    runs: dict[str, Callable[[], object]] = {"t": plain_message(*work.reference)}
    for name, transfer in work.plans.items():
        runs[name] = lambda transfer=transfer: run_plan(transfer, give, take)  # type: ignore[misc]
    if work.broadcast:
        runs[work.broadcast] = _broadcast((give or take)["x"])
    if work.one_by_one:
        runs[work.one_by_one] = lambda: _one_by_one(work, give, take)
    told = Told({name: [] for name in runs}, {})
    for turn in range(work.repeat):
        for name, act in runs.items():
            before = nic_bytes()
            told.seconds[name].append(timed(act))
            if turn == 0:
                dist.barrier()
                told.nic[name] = tuple(after - earlier for after, earlier in zip(nic_bytes(), before, strict=True))  # type: ignore[assignment]
                if name in work.plans or name == work.one_by_one:
                    _check(take, name)
    return told


def timed(act: Callable[[], object]) -> float:
    dist.barrier()  # the last one may not be over everywhere
    start = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    start_s = float(start.item())
    while (left_s := start_s - time.monotonic()) > 0:
        time.sleep(left_s)
    act()
    return time.monotonic() - start_s


def plain_message(giver: int, taker: int, num_bytes: int) -> Callable[[], None]:
    rank = dist.get_rank()
    buffer = torch.zeros(num_bytes if rank in (giver, taker) else 0, dtype=torch.uint8)

    def act() -> None:
        if rank == giver:
            dist.send(buffer, taker)
        elif rank == taker:
            dist.recv(buffer, giver)

    return act


def _broadcast(piece: Piece) -> Callable[[], None]:
    return lambda: dist.broadcast(piece.tensor, 0) and None


def _one_by_one(work: Work, give: Mapping[str, Piece], take: Mapping[str, Piece]) -> None:
    for move in work.moves:
        plan = plan_reshard([move], work.host_of)
        run_plan(plan, {move.name: give[move.name]}, {move.name: take[move.name]})


def _pieces(layouts: Sequence[tuple[str, Layout]], rank: int) -> dict[str, Piece]:
    found = {}
    for name, layout in layouts:
        held = layout.shards_of(rank)
        if held:
            shards = tuple(Shard(0, shard.box, shard.offset, shard.strides) for shard in held)
            size = max(shard.offset + shard.box.size for shard in shards)
            found[name] = Piece(torch.zeros(size, dtype=torch_dtype(layout.dtype)), layout.global_shape, shards)
    return found


def _views(piece: Piece) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each shard, its memory and what belongs there: every element its number in the whole tensor."""
    total = 1
    for size in piece.global_shape:
        total *= size
    numbers = torch.arange(total, dtype=torch.int32).to(piece.tensor.dtype).reshape(piece.global_shape)
    views = []
    for shard in piece.shards:
        assert shard.strides is not None
        memory = piece.tensor.as_strided(shard.box.shape, shard.strides, shard.offset)
        views.append((memory, numbers[shard.box.slices()]))
    return views


def _fill(piece: Piece) -> None:
    for memory, numbers in _views(piece):
        memory.copy_(numbers)


def _check(take: Mapping[str, Piece], contestant: str) -> None:
    for name, piece in take.items():
        for memory, numbers in _views(piece):
            if not torch.equal(memory, numbers):
                raise AssertionError(f"{contestant} left wrong bits in {name}")
        piece.tensor.zero_()


def nic_bytes() -> tuple[int, int]:
    """Bytes that this host has sent and received, by the counters of its interface."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == "eth0":
            fields = counters.split()
            return int(fields[8]), int(fields[0])
    return 0, 0
