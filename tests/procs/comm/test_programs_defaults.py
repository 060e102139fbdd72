"""What a program has set around a call: default device and dtype, modes of autograd, casts, tensors without values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.plain import entities_of
from remesh.comm.gather import all_gather_json
from remesh.foundation.errors import ConfigError
from remesh.resharding import Target
from remesh.resharding.refit import Refit
from remesh.testbed.pool import RankPool

Around = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


_AROUND: dict[str, Around] = {
    "default device": _default_device,
    "default dtype": _default_dtype,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": _autocast,
}


def _state(start: float) -> dict[str, Any]:
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    local = torch.arange(24.0).reshape(6, 4) + start + 100 * rank
    return {
        "cut": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "strided": (torch.arange(12.0).reshape(3, 4) + start).T,
        "large": torch.arange(70_000.0) + start,
        "none": torch.empty(0, 3),
        "list": [1, {"t": torch.full((2,), start, dtype=torch.bfloat16)}],
        "step": 3,
    }


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    return found | {"t": state["list"][1]["t"]}


def _check(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, one in right.items():
        local, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, found[name]))
        assert local.equal(other), name


def _give(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in _tensors(state).items() if name != "none"}


class _Calls:
    """Every public entry, called with the context around it, between a state that is and one that is filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.number = _state(1.0), 0
        self.refits = Refit(_give(_state(0.0)), group=None)

    def save(self, around: Around) -> None:
        for background in (False, True):
            path = self._next()
            with around():
                remesh.save(self.source, path, background=background).result()
            got = remesh.load(_state(0.0), path)
            _check(_tensors(got), _tensors(self.source))

    def load(self, around: Around) -> None:
        path = self._next()
        remesh.save(self.source, path)
        wanted = _state(0.0)
        with around():
            got = remesh.load(wanted, path)
        _check(_tensors(got), _tensors(self.source))

    def checkpoints(self, around: Around) -> None:
        wanted = _state(0.0)
        with around(), remesh.Checkpoints(self._next(), keep=1) as checkpoints:
            checkpoints.save(1, self.source, metrics={"loss": 1.0})
            checkpoints.save(2, self.source, metrics={"loss": 0.5})
            assert checkpoints.latest() == checkpoints.best("loss") == 2
            got = checkpoints.load(wanted)
        _check(_tensors(got), _tensors(self.source))

    def sharded(self, around: Around) -> None:
        path = self._next()
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        with around():
            dist_checkpointing.save(entities_of(self.source), path)
        _check(_tensors(remesh.load(_state(0.0), path)), _tensors(self.source))

    def reshard(self, around: Around) -> None:
        wanted = _give(_state(0.0))
        with around():
            remesh.reshard(_give(self.source), wanted)
        _check(wanted, _give(self.source))

    def reshard_to_targets(self, around: Around) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with around():
            found = remesh.reshard({"cut": self.source["cut"]}, to={"cut": Target(mesh, [Replicate()])})
        assert (
            found.made["cut"]
            .to_local()
            .equal(torch.cat([torch.arange(24.0).reshape(6, 4) + 1 + 100 * rank for rank in range(2)]))
        )

    def refit(self, around: Around) -> None:
        """One that lives on from one context to the next."""
        self.number += 1
        with around():
            self.refits.push(_give(self.source), self.number)
            with self.refits.read() as snapshot:
                _check(dict(snapshot.tensors), _give(self.source))  # type: ignore[arg-type]

    def gather(self, around: Around) -> None:
        with around():
            long = ["long" * 999, dist.get_rank()]
            assert all_gather_json(long) == [["long" * 999, rank] for rank in range(dist.get_world_size())]

    def _next(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)


_ENTRIES = ["save", "load", "checkpoints", "sharded", "reshard", "reshard_to_targets", "refit", "gather"]


def _call_all(name: str, entry: str, folder: Path, who: int) -> None:
    around = _AROUND[name]
    calls = _Calls(folder)
    here: Around = around if dist.get_rank() == who else contextlib.nullcontext
    for each in (here, contextlib.nullcontext, around, contextlib.nullcontext):
        getattr(calls, entry)(each)


@pytest.mark.parametrize("entry", _ENTRIES)
@pytest.mark.parametrize("name", _AROUND)
def test_what_a_program_has_set_changes_no_value(ranks: RankPool, tmp_path: Path, name: str, entry: str) -> None:
    for who in range(2):
        ranks.run(_call_all, 2, (name, entry, tmp_path / str(who), who))


def _call_with_fake_tensors(entry: str, folder: Path, who: int) -> str:
    calls = _Calls(folder)
    mode: Around = FakeTensorMode if dist.get_rank() == who else contextlib.nullcontext
    try:
        getattr(calls, entry)(mode)
    except ConfigError as raised:
        getattr(calls, entry)(contextlib.nullcontext)
        return str(raised)
    return ""


@pytest.mark.parametrize("entry", _ENTRIES)
def test_a_mode_without_values_is_refused_by_all_ranks(ranks: RankPool, tmp_path: Path, entry: str) -> None:
    first, second = ranks.run(_call_with_fake_tensors, 2, (entry, tmp_path, 1))
    assert "FakeTensorMode is on" in first and "rank 1" in first
    assert "FakeTensorMode is on" in second


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(ValueError, match="'w'.* a FakeTensor"):
        remesh.save({"w": fake}, tmp_path / "c")
