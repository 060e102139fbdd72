"""A whole job without root: run, increments, a checkpoint that stops, and a restart under another MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import remesh
from remesh.mpi.mpis import find_mpi
from tests.mpi.conftest import PROGRAMS

pytestmark = pytest.mark.mpi

_NOBODY = 65534
_PATIENCE_S = 120.0
_PATHS = os.pathsep.join(str(Path(module.__file__ or "").parents[1]) for module in (remesh, click))


class User:
    """Somebody who is not root, with a folder of his own."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self._python = python
        self._environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": _PATHS}
        self._environment |= {name: value for name, value in os.environ.items() if name.startswith("REMESH_MPI_")}
        os.chown(folder, _NOBODY, _NOBODY)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        who = ("--reuid", str(_NOBODY), "--regid", str(_NOBODY), "--clear-groups", "--no-new-privs")
        return subprocess.Popen(
            ["setpriv", *who, self._python, *arguments],
            env=self._environment,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Status and words of a Python."""
        process = self.start(*arguments)
        try:
            said, _ = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, _ = process.communicate(timeout=_PATIENCE_S)
        return process.returncode, said


@pytest.fixture
def user() -> Iterator[User]:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become somebody else")
    folder = Path(tempfile.mkdtemp(prefix="remesh-rootless-"))  # pytest's own folders are closed to others
    try:
        pythons = [name for name in ("/usr/bin/python3", sys.executable) if Path(name).exists()]
        able = [User(folder, name) for name in pythons]
        one = next((one for one in able if one.run("-c", "import click, rich, remesh.cli")[0] == 0), None)
        if one is None or any(one.run("-c", _start(name))[0] for name in ("mpich", "openmpi")):
            pytest.skip("needs a Python, a checkout and MPI environments that any user may read")
        yield one
    finally:
        shutil.rmtree(folder)


def _start(mpi: str) -> str:
    python = find_mpi(mpi).python
    return f"import subprocess; subprocess.run([{python!r}, '-c', 'import mpi4py'], check=True)"


def test_a_job_needs_no_root(user: User) -> None:
    job = user.folder / "j"
    shutil.copy(PROGRAMS / "ring.py", user.folder)
    ring = ("ring.py", "30", "0.3")
    how = ("-n", "4", "--mpi", "mpich", "--incremental", "--job", str(job))
    running = user.start("-m", "remesh", "mpi", "run", *how, *ring)
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (job / "state.json").exists() or '"running"' not in (job / "state.json").read_text():
            assert time.monotonic() < deadline_s and running.poll() is None
            time.sleep(0.05)
        for more in ([], ["--stop"]):
            status, said = user.run("-m", "remesh", "mpi", "checkpoint", *more, str(job))
            assert status == 0, said
        said, _ = running.communicate(timeout=_PATIENCE_S)
    finally:
        if running.poll() is None:
            running.terminate()
            running.communicate(timeout=_PATIENCE_S)
    assert running.returncode == 0, said
    assert '"builds_upon": [\n   1\n  ]' in (job / "images" / "000002" / "manifest.json").read_text()
    status, said = user.run("-m", "remesh", "mpi", "restart", str(job), "--mpi", "openmpi")
    assert status == 0 and "answer b1cd1c8a14377307" in said, said
    assert job.stat().st_uid == _NOBODY
