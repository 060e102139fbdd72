"""What a program has set around a call: default device and dtype, modes of autograd, casts, tensors without values.

And who calls, with what: a caller that torch.compile compiles; tensors and modules that were copied deeply.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")
Caller = Callable[[Callable[[], T]], T]
"""What makes a call of Remesh."""


def _plainly(call: Callable[[], T]) -> T:
    return call()


def _within(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Caller[Any]:
    def make(call: Callable[[], T]) -> T:
        with context():
            return call()

    return make


def _compiled(call: Callable[[], T]) -> T:
    """The code that calls is compiled, and Dynamo would trace all below."""
    torch._dynamo.reset()
    return torch.compile(call, backend="eager")()


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


_CALLERS: dict[str, Caller[Any]] = {
    "default device": _within(_default_device),
    "default dtype": _within(_default_dtype),
    "no_grad": _within(torch.no_grad),
    "inference": _within(torch.inference_mode),
    "autocast": _within(_autocast),
    "compiled": _compiled,
}


def _state(start: float) -> dict[str, Any]:
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    local = torch.arange(24.0).reshape(6, 4) + start + 100 * rank
    module = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(module.weight, start + 0.5)
    torch.nn.init.constant_(module.bias, start - 0.5)
    return {
        "cut": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "strided": (torch.arange(12.0).reshape(3, 4) + start).T,
        "large": torch.arange(70_000.0) + start,
        "none": torch.empty(0, 3),
        "list": [1, {"t": torch.full((2,), start, dtype=torch.bfloat16)}],
        "module": module,
        "step": 3,
    }


def _copied_state(start: float) -> dict[str, Any]:
    return copy.deepcopy(_state(start))


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    return found | {"t": state["list"][1]["t"]} | state["module"].state_dict()


def _check(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, one in right.items():
        local, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, found[name]))
        assert local.equal(other), name


def _give(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in _tensors(state).items() if name != "none"}


class _Calls:
    """Every public entry, called by a caller, between a state that is and one that is filled."""

    def __init__(self, folder: Path, state: Callable[[float], dict[str, Any]] = _state) -> None:
        self.folder, self.state = folder, state
        self.source, self.number = state(1.0), 0
        self.refits = Refit(_give(state(0.0)), group=None)

    def save(self, caller: Caller[Any]) -> None:
        for background in (False, True):
            path = self._next()
            caller(
                lambda path=path, background=background: remesh.save(self.source, path, background=background).result()
            )
            got = remesh.load(self.state(0.0), path)
            _check(_tensors(got), _tensors(self.source))

    def _save(self, path: Path, background: bool) -> None:
        remesh.save(self.source, path, background=background).result()

    def load(self, caller: Caller[Any]) -> None:
        path = self._next()
        remesh.save(self.source, path)
        wanted = self.state(0.0)
        got = caller(lambda: remesh.load(wanted, path))
        _check(_tensors(got), _tensors(self.source))

    def checkpoints(self, caller: Caller[Any]) -> None:
        path, wanted = self._next(), self.state(0.0)

        def call() -> tuple[list[int | None], dict[str, Any]]:
            with remesh.Checkpoints(path, keep=1) as checkpoints:
                checkpoints.save(1, self.source, metrics={"loss": 1.0})
                checkpoints.save(2, self.source, metrics={"loss": 0.5})
                return [checkpoints.latest(), checkpoints.best("loss")], checkpoints.load(wanted)

        steps, got = caller(call)
        assert steps == [2, 2]
        _check(_tensors(got), _tensors(self.source))

    def sharded(self, caller: Caller[Any]) -> None:
        path = self._next()
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        caller(lambda: dist_checkpointing.save(entities_of(self.source), path))
        _check(_tensors(remesh.load(self.state(0.0), path)), _tensors(self.source))

    def reshard(self, caller: Caller[Any]) -> None:
        give, wanted = _give(self.source), _give(self.state(0.0))
        caller(lambda: remesh.reshard(give, wanted))
        _check(wanted, _give(self.source))

    def reshard_to_targets(self, caller: Caller[Any]) -> None:
        target = Target(init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])
        found = caller(lambda: remesh.reshard({"cut": self.source["cut"]}, to={"cut": target}))
        assert (
            found.made["cut"]
            .to_local()
            .equal(torch.cat([torch.arange(24.0).reshape(6, 4) + 1 + 100 * rank for rank in range(2)]))
        )

    def refit(self, caller: Caller[Any]) -> None:
        """One that lives on from one caller to the next."""
        self.number += 1
        give = _give(self.source)

        def call() -> dict[str, torch.Tensor]:
            self.refits.push(give, self.number)
            with self.refits.read() as snapshot:
                return {name: tensor.clone() for name, tensor in snapshot.tensors.items()}  # type: ignore[union-attr]

        _check(caller(call), give)

    def gather(self, caller: Caller[Any]) -> None:
        long = ["long" * 999, dist.get_rank()]
        found = caller(lambda: all_gather_json(long))
        assert found == [["long" * 999, rank] for rank in range(dist.get_world_size())]

    def _next(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)


_ENTRIES = ["save", "load", "checkpoints", "sharded", "reshard", "reshard_to_targets", "refit", "gather"]


def _call_all(name: str, entry: str, folder: Path, who: int) -> None:
    caller = _CALLERS[name]
    calls = _Calls(folder, _copied_state if who else _state)
    here: Caller[Any] = caller if dist.get_rank() == who else _plainly
    for each in (here, _plainly, caller, _plainly):
        getattr(calls, entry)(each)


@pytest.mark.parametrize("entry", _ENTRIES)
@pytest.mark.parametrize("name", _CALLERS)
def test_what_a_program_has_set_changes_no_value(ranks: RankPool, tmp_path: Path, name: str, entry: str) -> None:
    for who in range(2):
        ranks.run(_call_all, 2, (name, entry, tmp_path / str(who), who))


def _call_with_fake_tensors(entry: str, folder: Path, who: int) -> str:
    calls = _Calls(folder)
    caller: Caller[Any] = _within(FakeTensorMode) if dist.get_rank() == who else _plainly
    try:
        getattr(calls, entry)(caller)
    except ConfigError as raised:
        getattr(calls, entry)(_plainly)
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
