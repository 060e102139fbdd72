"""A build without the C extension says what is missing, and how to get it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.carried.mpi.extension import NAME, find_missing
from remesh.cli.mpi import mpi
from remesh.foundation.errors import ConfigError


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Remesh that was built without a compiler."""
    import_any = importlib.import_module

    def import_module(name: str, package: str | None = None) -> object:
        if name == NAME:
            raise ImportError(f"No module named {name!r}")
        return import_any(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_the_extension_is_there() -> None:
    assert find_missing() is None


@pytest.mark.usefixtures("unbuilt")
def test_a_missing_extension_is_told_in_one_line_with_what_to_do() -> None:
    said = find_missing()
    assert said is not None and "\n" not in said
    assert NAME in said and "it was not built; install a C compiler" in said and "hatch_build.py" in said


@pytest.mark.usefixtures("unbuilt")
def test_no_job_is_made_without_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").touch()
    result = CliRunner().invoke(mpi, ["run", "-n", "2", "--job", "job", "app.py"])
    assert isinstance(result.exception, ConfigError) and "C compiler" in str(result.exception)
    assert not (tmp_path / "job").exists()
