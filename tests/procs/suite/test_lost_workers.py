"""A run of tests whose worker dies has failed, whatever the other workers say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT

pytestmark = pytest.mark.procs

_DIES_AS_IT_COLLECTS = """
import os
def pytest_collectstart():
    if os.environ.get("PYTEST_XDIST_WORKER") in {workers}:
        os._exit(0)
"""
_PASSES = "def test_a_word(): pass\n"
_ENDS = "import os\ndef test_an_end(): os._exit(0)\n"


def _run(folder: Path, *, conftest: str = "", test: str = _PASSES) -> tuple[int, str]:
    """Two workers, with the hooks of these tests: how the run ended, and what it said."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_one.py").write_text(test)
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "tests.conftest", "-p", "no:cacheprovider")
    workers = ("--numprocesses", "2", "--max-worker-restart", "1", "--dist", "loadfile")
    command = [sys.executable, "-m", "pytest", *options, *workers, folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_worker_that_dies_while_it_collects_fails_a_run_in_which_all_else_passes(tmp_path: Path) -> None:
    status, said = _run(tmp_path, conftest=_DIES_AS_IT_COLLECTS.format(workers=["gw1"]))
    assert "1 passed" in said
    assert status == pytest.ExitCode.INTERNAL_ERROR, said


@pytest.mark.slow
def test_a_run_whose_workers_all_die_while_they_collect_has_failed(tmp_path: Path) -> None:
    status, said = _run(tmp_path, conftest=_DIES_AS_IT_COLLECTS.format(workers=["gw0", "gw1", "gw2"]))
    assert status == pytest.ExitCode.INTERNAL_ERROR, said


@pytest.mark.slow
def test_a_test_that_ends_its_worker_has_failed(tmp_path: Path) -> None:
    status, said = _run(tmp_path, test=_ENDS)
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "crashed while running" in said
