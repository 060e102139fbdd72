"""Who carries MPI programs, or looks at plans and layouts, needs no torch: tried in an environment that has none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import remesh

pytestmark = pytest.mark.procs

_NEEDED = ("click", "isal", "markdown_it", "mdurl", "numpy", "pygments", "rich")
"""What ``pip install remesh`` brings, and what that needs."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of an interpreter that finds Remesh and the packages that it needs, and no other."""
    packages = tmp_path_factory.mktemp("packages")
    for name in _NEEDED:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations, f"{name} is not installed"
        folder = Path(spec.submodule_search_locations[0])
        (packages / name).symlink_to(folder)
        if (libraries := folder.with_name(f"{name}.libs")).is_dir():
            (packages / libraries.name).symlink_to(libraries)
    paths = [str(Path(remesh.__file__).parents[1]), str(packages)]
    start = f"import sys; sys.path[:0] = {paths!r}; "
    return [sys.executable, "-I", "-S", "-c", start]


def _run(python: list[str], code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    *command, start = python
    return subprocess.run([*command, start + code], cwd=cwd, capture_output=True, text=True, timeout=250)


def _remesh(python: list[str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return _run(python, f"from remesh.cli import main; main({list(arguments)!r})", cwd)


def test_there_is_no_torch(python: list[str], tmp_path: Path) -> None:
    assert "No module named 'torch'" in _run(python, "import torch", tmp_path).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("mpi", "run", "--help"),
        ("mpi", "ls"),
        ("plan", "--shape", "64,64", "--src", "S0R@2x2", "--dst", "RS0@2x2"),
        ("pipeline", "--help"),
        ("ckpt", "ls", "--help"),
        ("testbed", "--help"),
    ],
    ids=" ".join,
)
def test_a_verb_that_moves_no_tensors_runs(python: list[str], arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = _remesh(python, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [("run", "script.py"), ("ckpt", "ls", "."), ("net",)], ids=" ".join)
def test_a_verb_that_needs_it_says_so_in_one_line(
    python: list[str], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = _remesh(python, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'remesh[torch]'" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "call",
    [
        *("remesh.save({}, 'x')", "remesh.reshard({}, {})", "remesh.elastic(print)", "remesh.pipeline.Pipeline"),
        *("import remesh.dist_checkpointing", "from remesh import dist_checkpointing"),
    ],
)
def test_a_call_that_needs_it_says_so(python: list[str], call: str, tmp_path: Path) -> None:
    done = _run(python, f"import remesh; {call}", tmp_path)
    assert "remesh.foundation.errors.ConfigError" in done.stderr and "pip install 'remesh[torch]'" in done.stderr, (
        done.stderr
    )


def test_layouts_and_plans_are_computed(python: list[str], tmp_path: Path) -> None:
    code = (
        "from remesh.layout import Box; from remesh.resharding.planning.planner import plan_reshard;"
        "print(Box.at((0, 0), (2, 3)).size)"
    )
    done = _run(python, code, tmp_path)
    assert done.stdout == "6\n", done.stderr
