"""A host that is missing or too old is told in one line that names the extra, by every module that plugs into one."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError

import pytest

from remesh.foundation.errors import ConfigError
from remesh.integrations.megatron_core import put_in_place

_HOSTS = (
    ("accelerate", "accelerate", "1.10"),
    ("lightning", "lightning", "2.5"),
    ("torchtitan", "torchtitan", "0.3"),
    ("transformers", "transformers", "5.0"),
    ("verl", "verl", "0.9"),
    ("verl_shards", "verl", "0.9"),
    ("vllm", "vllm", "0.33"),
    ("megatron_core", "megatron-core", "0.12"),
)
"""Module, package, and the oldest version that it takes."""
_THEIRS = "megatron.core.dist_checkpointing"


def _plug_in(module: str) -> None:
    if module == "megatron_core":
        put_in_place()
        return
    kept = {
        name: sys.modules.pop(name)
        for name in (f"remesh.integrations.{module}", "remesh.integrations.verl")
        if name in sys.modules
    }
    try:
        importlib.import_module(f"remesh.integrations.{module}")
    finally:
        sys.modules.update(kept)


def _no_package(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(("found", "told"), [(_no_package, "found none"), (lambda name: "0.1.9", "found 0.1.9")])
@pytest.mark.parametrize(("module", "package", "version"), _HOSTS)
def test_a_host_that_is_missing_or_too_old_is_told_in_one_line_with_its_extra(
    module: str, package: str, version: str, found: Callable[[str], str], told: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remesh.integrations.host_programs.version", found)
        with pytest.raises(ConfigError) as raised:
            _plug_in(module)
    text = str(raised.value)
    assert "\n" not in text and f"{package}>={version}" in text and told in text and f"remesh[{package}]" in text


@pytest.fixture
def _with_megatron() -> Iterator[pytest.MonkeyPatch]:
    before = dict(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remesh.integrations.host_programs.version", lambda name: "0.19.2")
        yield patch
    for name in sys.modules.keys() - before.keys():
        if name.startswith(_THEIRS):
            del sys.modules[name]


@pytest.mark.usefixtures("_with_megatron")
def test_every_import_of_megatrons_checkpoints_finds_ours() -> None:
    put_in_place()
    put_in_place()
    mapping = importlib.import_module(f"{_THEIRS}.mapping")
    assert mapping is importlib.import_module("remesh.dist_checkpointing.mapping")
    strategies = importlib.import_module(f"{_THEIRS}.strategies.fully_parallel")
    assert strategies.__name__ == "remesh.dist_checkpointing.strategies.fully_parallel"


def test_megatrons_own_that_is_imported_already_is_told(_with_megatron: pytest.MonkeyPatch) -> None:
    _with_megatron.setitem(sys.modules, _THEIRS, types.ModuleType(_THEIRS))
    with pytest.raises(ConfigError, match="in the first line of the script"):
        put_in_place()
