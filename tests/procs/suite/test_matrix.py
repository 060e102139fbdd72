"""`make matrix` takes every release of Python that it finds, also two of one minor version."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.rules.source_tree import ROOT

pytestmark = pytest.mark.procs


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", module)
    spec.loader.exec_module(module)
    for name in ("PYTHONS", "PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return module


def _python(path: Path, version: str) -> str:
    """A program that tells this version as Python does; none: it does not start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{f'echo {version}' if version else 'exit 127'}\n")
    path.chmod(0o755)
    return str(path)


def test_all_releases_are_found_each_once(matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [_python(tmp_path / "own" / "python3", "3.12.1"), _python(tmp_path / "own" / "python2", "2.7.18")]
    first = _python(tmp_path / "one" / "python3.11", "3.11.7")
    _python(tmp_path / "one" / "python3.13", "")
    second = _python(tmp_path / "two" / "python3.11", "3.11.2")
    _python(tmp_path / "three" / "python3.11", "3.11.7")
    _python(tmp_path / "pyenv" / "versions" / "3.11.9" / "bin" / "python", "3.11.9")
    of_pyenv = _python(tmp_path / "pyenv" / "versions" / "3.13.0" / "bin" / "python", "3.13.0")
    monkeypatch.setenv("PYTHONS", os.pathsep.join([*named, str(tmp_path / "nowhere")]))
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("one", "two", "three")))
    assert list(matrix.find_pythons().items()) == [
        ("3.11.2", second),
        ("3.11.7", first),
        ("3.12.1", named[0]),
        ("3.13.0", of_pyenv),
    ]


def test_a_pair_is_called_by_its_release_or_by_its_minor_version(matrix: ModuleType) -> None:
    pythons = {"3.11.2": "/a", "3.11.7": "/b", "3.13.0": "/c"}
    pairs = matrix.make_pairs(pythons, {one: ["2.14.0+cpu", "2.11.0+cpu"] for one in pythons})
    assert [pair.name for pair in pairs] == ["3.11.2-lowest", "3.11.2-newest", "3.11.7-newest", "3.13.0-newest"]

    def chosen(asked: str) -> list[str]:
        return [pair.name for pair in matrix.choose(pairs, pythons, asked)]

    assert chosen("3.11-newest") == ["3.11.2-newest", "3.11.7-newest"]
    assert chosen("3.11.7-newest,3.13-2.12.0") == ["3.11.7-newest", "3.13.0-2.12.0"]
    with pytest.raises(SystemExit, match=r"no pair is called '3.12-newest', found 3\.11\.2-lowest"):
        chosen("3.12-newest")
