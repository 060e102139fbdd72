"""What stays beside a program, a parent that reaps, in C and in Python; what a rank loads before its program runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import remesh
from remesh.carried.images.restore.reaper import REAPER

pytestmark = pytest.mark.procs

_PATIENCE_S = 120.0
_INIT = """
import os, sys, time
from pathlib import Path
from remesh.carried.images.restore import reaper
orders, news, form, ends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
for descriptor in (orders, news):
    os.set_inheritable(descriptor, False)  # a program has neither
if form == "python":
    reaper.REAPER = Path("/nowhere")
pids = []
for way in ("exit 0", "exit 7", ends):  # two strangers, and the program
    pids.append(os.fork())
    if pids[-1] == 0:
        os.execv("/bin/sh", ["sh", "-c", way])
print(*pids, flush=True)
reaper.reap_until_the_end(orders, news, pids[-1])
"""


@pytest.fixture(params=["c", "python"])
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "c" and not REAPER.exists():
        pytest.skip("remesh-init is not built: no C compiler")
    return str(request.param)


class _Init:
    """A process that reaps; what it says, and what it is told."""

    def __init__(self, form: str, ends: str) -> None:
        orders_out, self.orders = os.pipe()
        self.news, news_in = os.pipe()
        command = [sys.executable, "-c", _INIT, str(orders_out), str(news_in), form, ends]
        self.process = subprocess.Popen(command, pass_fds=(orders_out, news_in), stdout=subprocess.PIPE, text=True)
        os.close(orders_out)
        os.close(news_in)
        assert self.process.stdout is not None
        self.children = [int(pid) for pid in self.process.stdout.readline().split()]

    def said(self) -> list[dict[str, object]]:
        """All of it, once it has ended."""
        with open(self.news, "rb", closefd=False) as news:
            return [json.loads(line) for line in news.read().splitlines()]


@pytest.fixture
def inits() -> Iterator[list[_Init]]:
    made: list[_Init] = []
    yield made
    for init in made:
        init.process.kill()
        init.process.wait(_PATIENCE_S)
        assert init.process.stdout is not None
        init.process.stdout.close()
        os.close(init.news)


@pytest.mark.parametrize(("ends", "status"), [("exit 3", 3), ("exit 0", 0), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_how_the_program_ended_is_told_once(inits: list[_Init], form: str, ends: str, status: int) -> None:
    inits.append(init := _Init(form, ends))
    os.write(init.orders, b"!")
    assert init.said() == [{"event": "ended", "status": status}]
    assert init.process.wait(_PATIENCE_S) == 0
    os.close(init.orders)


def test_it_ends_when_the_lower_half_ends(inits: list[_Init], form: str) -> None:
    inits.append(init := _Init(form, "sleep 600"))
    os.write(init.orders, b"!")
    os.close(init.orders)
    try:
        assert init.said() == []
        assert init.process.wait(_PATIENCE_S) == 0
    finally:
        os.kill(init.children[-1], signal.SIGKILL)


def test_nobody_is_reaped_before_the_program_has_been_found(inits: list[_Init], form: str) -> None:
    inits.append(init := _Init(form, "exit 0"))
    for pid in init.children:  # ended, and still there
        while (text := Path(f"/proc/{pid}/stat").read_text()).rpartition(")")[2].split()[0] != "Z":
            assert init.process.poll() is None, text
    os.close(init.orders)
    assert init.said() == []


def test_a_stranger_that_ends_is_reaped_while_the_program_runs(inits: list[_Init], form: str) -> None:
    inits.append(init := _Init(form, "sleep 600"))
    os.write(init.orders, b"!")
    while any(_is_known(pid) for pid in init.children[:2]):
        assert init.process.poll() is None
    os.kill(init.children[-1], signal.SIGTERM)
    assert init.said() == [{"event": "ended", "status": -15}]
    os.close(init.orders)


def _is_known(pid: int) -> bool:
    """Whether a process runs, or has ended and was not reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


_TAKES_IMAGES = (
    "remesh.carried.images.write.dump",
    "remesh.foundation.linux.ptrace",
    "remesh.carried.images.restore.restore",
    "remesh.carried.images.form.format",
)
_LOADED_LATER = {
    "remesh.carried.mpi.lower.__main__": (
        *(*_TAKES_IMAGES, "logging", "ssl", "concurrent.futures", "numpy", "torch"),
        *("argparse", "isal", "random", "tempfile"),
    ),
    "remesh.carried.images.restore.init": (*_TAKES_IMAGES, "logging", "ssl", "concurrent.futures", "numpy", "torch"),
    "remesh.cli.mpi": ("rich", "ssl", "remesh.testbed.bed", "remesh.testbed.pool", "numpy", "torch"),
}


@pytest.mark.parametrize("module", _LOADED_LATER)
def test_what_most_jobs_do_not_need_is_loaded_when_it_is_needed(module: str) -> None:
    """Each costs processor time and memory at every start: on every rank, or once for the command."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {*done.stdout.split()} & {*_LOADED_LATER[module]}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(remesh.__file__).parents[1])}


_CARRIED = Path(remesh.__file__).parent / "carried"
_SOURCES = (*sorted((_CARRIED / "mpi").glob("_*.c")), _CARRIED / "images" / "restore" / "_reaper.c")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
@pytest.mark.parametrize("source", _SOURCES, ids=lambda source: source.name)
def test_what_stands_beside_a_program_compiles_without_a_warning(source: Path) -> None:
    options = ("-O2", "-Wall", "-Werror", "-fPIC", "-I", sysconfig.get_path("include"))
    done = subprocess.run(["cc", *options, "-c", str(source), "-o", "/dev/null"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
