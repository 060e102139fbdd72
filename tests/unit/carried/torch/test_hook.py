"""Something is done once a module has been imported, and the module is as it was."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from remesh.carried.torch.hook import after_import


def test_it_is_done_after_the_import_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    after_import("late_module", lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module("late_module")
    assert seen == [1]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    del sys.modules["late_module"]
    importlib.import_module("late_module")
    assert seen == [1]
    del sys.modules["late_module"]


def test_a_module_that_is_there_is_told_at_once() -> None:
    seen: list[str] = []
    after_import("json", lambda module: seen.append(module.__name__))
    assert seen == ["json"]
