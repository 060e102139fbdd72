"""Every name that users of Megatron Core import is here, or stands in the list of those that are not, with a reason."""

from __future__ import annotations

import importlib
import json
import operator
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_NAMES = json.loads((_ROOT / "tests/vectors/checkpoint_names.json").read_bytes())
_PACKAGE = "remesh.dist_checkpointing"


def is_there(path: str) -> bool:
    """Whether a module, or a name in a module, of the package can be imported."""
    module, _, name = f"{_PACKAGE}.{path}".rpartition(".")
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("module", _NAMES["here"], ids=lambda module: module or "package")
def test_the_names_of_a_module_can_be_imported_from_it(module: str) -> None:
    found = importlib.import_module(f"{_PACKAGE}.{module}" if module else _PACKAGE)
    absent = [name for name in _NAMES["here"][module] if not hasattr(found, name)]
    assert not absent, absent


@pytest.mark.parametrize("path", _NAMES["absent"])
def test_what_is_listed_as_absent_is_absent_and_told_to_users(path: str) -> None:
    assert not is_there(path)
    told = (_ROOT / "docs/checkpoint/differences.md").read_text(encoding="utf-8")
    assert f"`{path.rpartition('.')[2]}`" in told


def test_modules_are_attributes_of_the_package_as_soon_as_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """``dist_checkpointing.mapping.ShardedTensor`` works in Megatron Core without an import of the module."""
    for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module(_PACKAGE)
    monkeypatch.setattr("remesh.dist_checkpointing", fresh)
    for module in filter(None, _NAMES["here"]):
        assert operator.attrgetter(module)(fresh) is sys.modules[f"{_PACKAGE}.{module}"]
