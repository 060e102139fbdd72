"""Common data with objects of programs that are not here: listed and converted, never imported, never handed out."""

from __future__ import annotations

import enum
import io
import random
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats.data_file import dump_object, load_object
from remesh.checkpoint.formats.inert_objects import StandIn, find_stand_in
from remesh.checkpoint.run.reader import is_complete
from remesh.checkpoint.storage import location_of
from remesh.checkpoint.storage.integrity import CHECKSUMS_FNAME
from remesh.cli import main
from remesh.dist_checkpointing import ShardedTensor
from tests.profiles import seeds

_PROGRAM = "a_program_of_others.enums"
_REFUSED = f"{_PROGRAM}.Backend|member of an enumeration"
RUN: list[str] = []


class Backend(enum.Enum):
    """Pickled as a call of its class."""

    FLASH = 1
    FUSED = "two"


class Setting:
    """Pickled as a class, its arguments and a state."""

    def __init__(self, rate: float, names: list[str]) -> None:
        RUN.append("Setting")
        self.rate, self.names = rate, names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return 0


class Schedule(Setting):
    """Pickled as a call, with a state after it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, (self.rate, self.names), {"names": [*self.names]}


_WRITTEN: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "call": lambda member: (type(member), (member.value,)),
    "look-up": lambda member: (getattr, (type(member), member.name)),  # as Python 3.11.2 does
}


@pytest.fixture(params=_WRITTEN)
def program(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """A module that is there until the patch is undone; its enumeration is pickled as some release of Python does."""
    monkeypatch.setattr(Backend, "__reduce_ex__", lambda member, protocol: _WRITTEN[request.param](member))
    module = types.ModuleType(_PROGRAM)
    for kind in (Backend, Setting, Schedule):
        monkeypatch.setattr(kind, "__module__", _PROGRAM)
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "a_program_of_others", types.ModuleType("a_program_of_others"))
    monkeypatch.setitem(sys.modules, _PROGRAM, module)
    yield monkeypatch


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _random_value(rng: random.Random, depth: int) -> Any:
    leaves: list[Any] = [
        *(Backend.FLASH, Backend.FUSED, Setting(rng.random(), ["a"]), Schedule(0.5, ["x", "y"])),
        *(3, "text", None, torch.arange(3), b"", 2.5),
    ]
    if not depth or rng.random() < 0.4:
        return rng.choice(leaves)
    inner = [_random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    makers: list[Any] = [list, tuple, lambda some: dict(enumerate(some)), lambda some: Namespace(one=some)]
    return rng.choice(makers)([*inner, *inner[:1]])  # one of them twice, as the same object


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Namespace | Setting):
        return (type(value).__name__, _described(vars(value)))
    if isinstance(value, dict):
        return {key: _described(one) for key, one in value.items()}
    return type(value)(map(_described, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("seed", seeds(40, quick=10))
def test_what_was_read_without_its_classes_is_written_as_it_was(seed: int, program: pytest.MonkeyPatch) -> None:
    value = {"a": _random_value(random.Random(seed), 3), "b": Backend.FLASH, "c": Namespace(d=Backend.FLASH)}
    blob, told = _saved(value), _described(value)
    with program.context() as absent:
        absent.delitem(sys.modules, _PROGRAM)
        RUN.clear()
        held = load_object(blob, "a test", with_stand_ins=True)
        assert isinstance(held["b"], StandIn) and find_stand_in(held) is not None
        assert isinstance(held["c"], Namespace) and held["c"].d is held["b"]
        assert repr(held["b"]) in (f"<{_PROGRAM}.Backend(1)>", f"<{_PROGRAM}.Backend.FLASH>")
        again = dump_object(held, "a test")
        assert load_object(again, "a test", with_stand_ins=True)["b"] == held["b"]
        with pytest.raises(CheckpointFormatError, match=_REFUSED):
            load_object(_saved_only(again, "b"), "a test")
        assert not RUN
    assert _described(torch.load(io.BytesIO(again), weights_only=False)) == told


def _saved_only(blob: bytes, key: str) -> bytes:
    return dump_object({key: load_object(blob, "a test", with_stand_ins=True)[key]}, "a test")


@pytest.fixture
def checkpoint(tmp_path: Path, program: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of a program like Megatron's own, which is not here any more."""
    path = tmp_path / "iter_0000001"
    path.mkdir()
    whole = torch.arange(6.0)
    tensor = ShardedTensor("w", whole, whole.dtype, (6,), (6,), (0,), None)
    dist_checkpointing.save({"w": tensor, "args": {}}, str(path))
    (path / "common.pt").write_bytes(_saved({"args": Namespace(backend=Backend.FUSED, layers=4)}))
    (path / CHECKSUMS_FNAME).unlink()  # which others do not write
    with program.context() as absent:
        absent.delitem(sys.modules, _PROGRAM)
        yield path


def test_tools_list_and_convert_it_and_programs_are_told_the_class(checkpoint: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["ckpt", "show", str(checkpoint)], catch_exceptions=False)
    assert shown.exit_code == 0 and f"{_PROGRAM}.Backend" in shown.output and "w " in shown.output
    as_json = CliRunner().invoke(main, ["ckpt", "show", "--json", str(checkpoint)], catch_exceptions=False)
    assert as_json.exit_code == 0 and "Backend" in as_json.output
    assert is_complete(location_of(checkpoint))
    target = tmp_path / "converted"
    done = CliRunner().invoke(
        main, ["ckpt", "convert", "--to", "torch_dist", str(checkpoint), str(target)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    for path in (checkpoint, target):
        with pytest.raises(CheckpointFormatError, match=_REFUSED) as raised:
            remesh.load({"w": torch.zeros(6)}, path)
        assert raised.value.reason == "forbidden-global"
    with torch.serialization.safe_globals([(Backend, f"{_PROGRAM}.Backend"), getattr]):
        common = dist_checkpointing.load_common_state_dict(str(target))
    assert common["args"] == Namespace(backend=Backend.FUSED, layers=4)
