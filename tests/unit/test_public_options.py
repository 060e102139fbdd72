"""Every public callable refuses options that nobody knows, and values of the wrong type, before it does anything."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.foundation.errors import ConfigError, Error
from remesh.foundation.options import OptionError
from remesh.resharding import Resharder, plan_reshard, redistribute_across, reshard_async, reshard_tensor

_ROOMS = ("checkpoint", "elasticity", "layout", "pipeline", "resharding")
_NO_MESH: Any = None
_NOTHING = torch.zeros(0)

# Callables that take options as keywords of any name: a call that has everything else right, one of its options
# misspelt, and the right name.
CALLS: dict[str, tuple[Callable[..., object], str, str]] = {
    "Refit.__init__": (remesh.Refit, "strateg", "strategy"),
    "Resharder.__init__": (Resharder, "host_off", "host_of"),
    "elastic": (lambda **o: remesh.elastic(lambda job: None, {"dp": -1}, **o), "snapshot_evry", "snapshot_every"),
    "redistribute_across": (lambda **o: redistribute_across(torch.zeros(2), _NO_MESH, [], **o), "netwrk", "network"),
    "reshard": (lambda **o: remesh.reshard({}, {}, **o), "max_staging_byte", "max_staging_bytes"),
    "reshard_async": (lambda **o: reshard_async({}, {}, **o), "chunk_byte", "chunk_bytes"),
    "reshard_by_windows": (
        lambda **o: remesh.reshard_by_windows({}, to={}, window_bytes=1, **o),
        "chunk_byts",
        "chunk_bytes",
    ),
    "reshard_tensor": (
        lambda **o: reshard_tensor(_NOTHING, _NO_MESH, [], _NO_MESH, [], **o),
        "mising",
        "missing",
    ),
}
# Keywords that are the caller's own names: things to carry, fields of an event.
FREE = {"Job.carry", "Job.log"}
# Looks at its options itself, in its own tests.
ELSEWHERE = {"Pipeline.__init__"}


def elastic(**options: Any) -> None:
    remesh.elastic(lambda job: None, {"dp": -1}, **options)


WRONG_VALUES: list[tuple[str, Callable[[], object]]] = [
    ("missing", lambda: remesh.reshard({}, {}, missing="leave")),
    ("missing", lambda: plan_reshard([], {}, missing=True)),  # type: ignore[arg-type]
    ("network", lambda: plan_reshard([], {}, network={})),  # type: ignore[arg-type]
    ("chunk_bytes", lambda: plan_reshard([], {}, chunk_bytes="1")),  # type: ignore[arg-type]
    ("strategy", lambda: plan_reshard([], {}, strategy=None)),  # type: ignore[arg-type]
    ("readers_timeout_s", lambda: remesh.Refit(readers_timeout_s="5")),  # type: ignore[arg-type]
    ("readers_timeout_s", lambda: remesh.Refit(readers_timeout_s=-1)),
    ("readers_timeout_s", lambda: remesh.Refit(readers_timeout_s=float("nan"))),
    ("readers_timeout_s", lambda: remesh.Refit(readers_timeout_s=float("inf"))),
    ("group", lambda: remesh.Refit(group="x")),  # type: ignore[arg-type]
    ("group", lambda: Resharder("x")),  # type: ignore[arg-type]
    ("group", lambda: remesh.Checkpoints("nowhere", group="x")),  # type: ignore[arg-type]
    ("step", lambda: remesh.Checkpoints("nowhere").path_of("x")),  # type: ignore[arg-type]
    ("to", lambda: remesh.reshard({}, to=3)),
    ("window_bytes", lambda: remesh.reshard_by_windows({}, to={}, window_bytes="1 GiB")),  # type: ignore[arg-type]
    ("group", lambda: remesh.reshard({}, {}, group=3)),
    ("group", lambda: remesh.save({}, Path("nowhere"), group="gloo")),  # type: ignore[arg-type]
    ("group", lambda: remesh.load({}, Path("nowhere"), group=[0, 1])),  # type: ignore[arg-type]
    ("background", lambda: remesh.save({}, Path("nowhere"), background=1)),  # type: ignore[arg-type]
    ("background", lambda: remesh.Checkpoints("nowhere", background=1)),  # type: ignore[arg-type]
    ("strict", lambda: remesh.load({}, Path("nowhere"), strict=1)),  # type: ignore[arg-type]
    ("strict", lambda: remesh.load({}, Path("nowhere"), strict=0)),  # type: ignore[arg-type]
    ("in_place", lambda: remesh.Refit(in_place=1)),  # type: ignore[arg-type]
    ("seed", lambda: remesh.elastic(lambda job: None, {"dp": -1}, seed="x")),
    ("save_every", lambda: remesh.elastic(lambda job: None, {"dp": -1}, save_every="x")),
    *(
        (name, partial(elastic, **{name: value}))
        for name, values in {
            "timeout_s": (-1, 0, math.nan, math.inf, "x", None, True),
            "snapshot_every": (0, -1, 1.5, "x", True),
            "save_every": (0, -1, 1.5, True),
            "seed": (1.5, None, True),
        }.items()
        for value in values
    ),
]


# Values of the right type that nothing can be done with, and tensors that are none.
USELESS: list[tuple[str, Callable[[], object]]] = [
    ("strategy 'xx' is unknown", lambda: remesh.Refit(strategy="xx")),
    ("strategy 'xx' is unknown", lambda: Resharder(strategy="xx")),
    ("chunk_bytes is -1, expected at least 64", lambda: remesh.Refit(chunk_bytes=-1)),
    ("max_staging_bytes is -1, expected", lambda: remesh.Refit(max_staging_bytes=-1)),
    ("take.'w'. is a int, expected a DTensor", lambda: remesh.Refit({"w": 3})),  # type: ignore[dict-item]
    ("give.'w'. is a int, expected a DTensor", lambda: remesh.reshard({"w": 3}, {})),
    ("tensor 'w': on rank 0 it is of layout torch.sparse_coo", lambda: remesh.Refit({"w": torch.eye(2).to_sparse()})),
    ("tensor 'w': on rank 0 it is on the device meta", lambda: remesh.Refit({"w": torch.ones(2, device="meta")})),
]


def public_callables() -> Iterator[tuple[str, Any]]:
    """All that a user may call by a public name: functions, and the methods of classes."""
    for home in (remesh, *(importlib.import_module(f"remesh.{room}") for room in _ROOMS)):
        for name in getattr(home, "__all__", ()):
            thing = getattr(home, name)
            if not isinstance(thing, type):
                yield name, thing
            elif not issubclass(thing, Exception):
                methods = [own for own in vars(thing) if own == "__init__" or not own.startswith("_")]
                yield from ((f"{name}.{own}", getattr(thing, own)) for own in methods)


def test_every_callable_that_takes_any_keyword_is_known_here() -> None:
    found = set()
    for name, thing in public_callables():
        if inspect.isfunction(thing) or inspect.ismethod(thing):
            kinds = {parameter.kind for parameter in inspect.signature(thing).parameters.values()}
            if inspect.Parameter.VAR_KEYWORD in kinds:
                found.add(name)
    # The verbs are packages that can be called.
    assert found | {"elastic", "reshard"} == CALLS.keys() | FREE | ELSEWHERE


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str) -> None:
    call, wrong, right = CALLS[name]
    options: dict[str, Any] = {wrong: None}
    with pytest.raises(OptionError, match=f"no option '{wrong}' .did you mean '{right}'"):
        call(**options)


@pytest.mark.parametrize(("name", "call"), WRONG_VALUES)
def test_a_value_of_the_wrong_type_or_size_is_refused_by_name(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' is .*expected"):
        call()


@pytest.mark.parametrize(("words", "call"), USELESS)
def test_what_nothing_can_be_done_with_is_refused_at_once(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(Error, match=words):
        call()


def test_checkpoints_after_what_is_no_step_are_not_dropped(tmp_path: Path) -> None:
    checkpoints = remesh.Checkpoints(tmp_path)
    checkpoints.save(2, {"w": torch.ones(1)})
    wrong: list[Any] = [1.5, "x", None, True]
    for step in wrong:
        with pytest.raises(OptionError, match="option 'step' is .*expected int"):
            checkpoints.drop_after(step)
    assert checkpoints.steps() == [2]


def test_a_folder_in_which_nothing_can_be_saved_is_refused_before_the_first_save_is_due(tmp_path: Path) -> None:
    """Also by root, whom no rights keep out."""
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "run", tmp_path / "file", Path("/proc/1/runs")):
        with pytest.raises(ConfigError, match="checkpoints cannot be written under"):
            remesh.elastic(lambda job: None, {"dp": -1}, checkpoint=place, save_every=10)
    with pytest.raises(ConfigError, match="this process has no agent"):
        remesh.elastic(lambda job: None, {"dp": -1}, checkpoint=tmp_path / "new", save_every=10)
    assert not list((tmp_path / "new").iterdir())


def test_checkpoints_without_a_place_are_refused_before_the_first_one_is_due() -> None:
    with pytest.raises(ConfigError, match="save_every=10 without a place for checkpoints; give checkpoint="):
        remesh.elastic(lambda job: None, {"dp": -1}, save_every=10)
