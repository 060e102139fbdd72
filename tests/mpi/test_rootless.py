"""A whole job without root: run, increments, a checkpoint that stops, and a restart under another MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import remesh
from remesh.carried.mpi.mpis import find_mpi
from tests.mpi.conftest import FOREIGN, PROGRAMS
from tests.mpi.patience import communicate_patiently, wait_until

pytestmark = pytest.mark.mpi

_NOBODY = 65534
_PATHS = os.pathsep.join(str(path) for path in (*(Path(each.__file__).parents[1] for each in (remesh, click)), FOREIGN))


class User:
    """Somebody who is not root, with a folder of his own."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.gate = folder / "gate"
        self._python = python
        self._environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": _PATHS}
        self._environment |= {"TEST_GATE": str(self.gate)}
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
            said, _ = communicate_patiently(process)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, _ = communicate_patiently(process)
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
    for name in ("ring.py", "gate.py"):
        shutil.copy(PROGRAMS / name, user.folder)
    ring = ("ring.py", "30", "0.3")
    how = ("-n", "4", "--mpi", "mpich", "--incremental", "--job", str(job))
    running = user.start("-m", "remesh", "mpi", "run", *how, *ring)
    try:
        state = job / "state.json"
        wait_until(lambda: running.poll() is not None or (state.exists() and '"running"' in state.read_text()))
        assert running.poll() is None
        for more in ([], ["--stop"]):
            status, said = user.run("-m", "remesh", "mpi", "checkpoint", *more, str(job))
            assert status == 0, said
        said, _ = communicate_patiently(running)
    finally:
        if running.poll() is None:
            running.terminate()
            communicate_patiently(running)
    assert running.returncode == 0, said
    assert '"builds_upon": [\n   1\n  ]' in (job / "images" / "000002" / "manifest.json").read_text()
    user.gate.touch()
    status, said = user.run("-m", "remesh", "mpi", "restart", str(job), "--mpi", "openmpi")
    assert status == 0 and "answer b1cd1c8a14377307" in said, said
    assert job.stat().st_uid == _NOBODY
