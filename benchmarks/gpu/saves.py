"""State of devices to disk and back, beside torch DCP, a raw write, and a plain copy into locked memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import remesh
from benchmarks.gpu.bench_rank import BenchRank, Compared
from remesh.checkpoint.background.staging import StagingBuffers

_NUM_TENSORS = 16
_GB = 1e9
State = dict[str, torch.Tensor]


def save(place: BenchRank) -> Compared:
    """A blocking save, beside DCP's, against a raw write of the bytes with fsync."""
    state = _state(place)
    ours = place.seconds_into_folder(lambda path: remesh.save(state, path))
    theirs = place.seconds_into_folder(lambda path: dcp.save(state, checkpoint_id=path))
    raw = place.seconds(lambda: _write(place, state))
    place.clear_folder()
    return _rates(place, ours, "dcp.save", theirs, "raw write", raw)


def load(place: BenchRank) -> Compared:
    """A load into the device, beside DCP's, against a raw read. What is read was just written: it is in memory."""
    state = _state(place)
    by_us, by_dcp = place.fresh_folder(), place.fresh_folder()
    remesh.save(state, by_us)
    dcp.save(state, checkpoint_id=by_dcp)
    _write(place, state)
    ours = place.seconds(lambda: remesh.load(dict(state), by_us))
    theirs = place.seconds(lambda: dcp.load(state, checkpoint_id=by_dcp))
    raw = place.seconds(lambda: (place.folder / f"raw-{place.rank}").read_bytes())
    place.clear_folder()
    return _rates(place, ours, "dcp.load", theirs, "raw read", raw)


def blocked(place: BenchRank) -> Compared:
    """Milliseconds that a save in the background keeps its caller, beside DCP's, against a plain copy."""
    state = _state(place)
    ours = _blocked_ms(place, lambda path: remesh.save(state, path, background=True))
    theirs = _blocked_ms(place, lambda path: dcp.async_save(state, checkpoint_id=path))
    host = _host_like(place, state)
    copy = 1e3 * place.seconds(lambda: _copy(host, state))
    return Compared("", ours, "dcp.async_save", theirs, "plain copy into locked memory", copy)


def device_to_host(place: BenchRank) -> Compared:
    """From the call until all is on the host, in memory that is used again."""
    state, buffers = _state(place), StagingBuffers()
    tensors = list(state.values())

    def stage() -> None:
        buffers.give_back(buffers.copy(tensors).wait())

    stage()
    ours = place.seconds(stage)
    host = _host_like(place, state)
    plain = place.seconds(lambda: _copy(host, state))
    pageable = place.seconds(lambda: [tensor.to("cpu", copy=True) for tensor in tensors])
    return _rates(place, ours, "tensor.cpu()", pageable, "plain copy into locked memory", plain)


def _state(place: BenchRank) -> State:
    """Tensors that this rank alone has."""
    count = place.state_bytes // _NUM_TENSORS // 2
    return {
        f"rank{place.rank}.{number}": torch.full((count,), 1.0, dtype=torch.bfloat16, device=place.device)
        for number in range(_NUM_TENSORS)
    }


def _rates(place: BenchRank, ours_s: float, peer: str, peer_s: float, bound: str, bound_s: float) -> Compared:
    ours, theirs, best = (place.state_bytes / seconds / _GB for seconds in (ours_s, peer_s, bound_s))
    return Compared("", ours, peer, theirs, bound, best)


def _write(place: BenchRank, state: State) -> None:
    content = next(iter(state.values())).cpu().view(torch.uint8).numpy().data
    with (place.folder / f"raw-{place.rank}").open("wb", buffering=0) as file:
        for _ in state:
            file.write(content)
        os.fsync(file.fileno())


def _host_like(place: BenchRank, state: State) -> State:
    pin = not place.is_small
    return {name: torch.empty_like(one, device="cpu", pin_memory=pin) for name, one in state.items()}


def _copy(host: State, state: State) -> None:
    for name, tensor in state.items():
        host[name].copy_(tensor, non_blocking=True)


def _blocked_ms(place: BenchRank, begin: Callable[[Path], object]) -> float:
    """Of the last of three saves, when memory is there; the slowest rank counts."""
    for _ in range(3):
        path = place.fresh_folder()
        place.settle()
        dist.barrier()
        begun_s = time.perf_counter()
        saved = begin(path)
        taken = torch.tensor(1e3 * (time.perf_counter() - begun_s))
        assert isinstance(saved, Future)
        saved.result()
        place.clear_folder()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()
