"""A program that does not end is ended, and tells where it stood."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from remesh.foundation.linux.procfs import family_of, start_of, work_of
from remesh.testbed.quiet_limit import QuietLimit
from tests.procs import progress
from tests.procs.carried.torch_jobs import run_natively
from tests.procs.forked_programs import ALONE, end, run_program, start
from tests.procs.progress import Headway

_PROGRAM = """\
import os, signal, subprocess, sys, threading

def wait_in_a_thread():
    threading.Event().wait()

def wait_in_a_fork():
    open("fork", "w").close()
    signal.pause()

if os.fork() == 0:
    wait_in_a_fork()
threading.Thread(target=wait_in_a_thread).start()
code = "def wait_in_another_python():\\n open('another', 'w').close()\\n import signal; signal.pause()\\n"
child = subprocess.Popen([sys.executable, "-c", code + "wait_in_another_python()"], start_new_session=True)
open("program", "w").close()
child.wait()
"""

_ENDS_EARLY = """\
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if dist.get_rank() == 1:
    time.sleep(0.5)
dist.all_reduce(torch.ones(2), async_op=True)  # by its end nobody but gloo's thread has the tensor
dist.destroy_process_group()  # but DDP still has it
print("end")
"""


@pytest.mark.procs
@pytest.mark.parametrize("last", ["", "sys.exit()"])
def test_a_program_ends_while_gloo_is_busy_with_its_tensors(tmp_path: Path, last: str) -> None:
    (tmp_path / "ends.py").write_text(_ENDS_EARLY + last)
    assert run_natively(str(tmp_path / "ends.py"), 2) == ["end", "end"]


@pytest.mark.procs
def test_a_program_has_the_environment_that_there_is_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what there was when the server was started, of which it is forked."""
    (tmp_path / "tells.py").write_text("import os; print(os.environ.get('COME'), os.environ.get('GONE'))")
    for name, value in (("GONE", "1"), ("COME", "2")):
        monkeypatch.setenv(name, value)
        told = run_program(tmp_path / "tells.py", tmp_path)
        monkeypatch.delenv("GONE", raising=False)
    assert told == "None 1\n2 None\n"  # one behind the other


@pytest.mark.procs
def test_the_stacks_of_all_processes_of_a_program_that_stands_still_are_told(tmp_path: Path) -> None:
    (tmp_path / "stands.py").write_text(_PROGRAM)
    output, errors = tmp_path / "output", tmp_path / "errors"
    program = start(["stands.py"], tmp_path, ALONE, output, errors)
    limit = QuietLimit(lambda: sum(map(work_of, family_of(program.pid))), 100)
    while not all((tmp_path / name).exists() for name in ("fork", "program", "another")):
        assert program.poll() is None and not limit.is_over(), errors.read_text()
        time.sleep(0.02)
    family = family_of(program.pid)
    assert end([program], quiet_s=0.1) == [None]
    told = errors.read_text()
    assert told.count("Fatal Python error: Aborted") == len(family) == 3, told
    for name in ("wait_in_a_thread", "wait_in_a_fork", "wait_in_another_python", "in do_", "child of"):
        assert name in told, told
    assert all(start_of(pid) is None for pid in family)


@pytest.mark.procs
def test_who_starts_processes_gets_somewhere_and_who_looks_around_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    work, family = dict.fromkeys(range(5), 0), [0]
    monkeypatch.setattr(progress, "family_of", lambda *roots: family)
    monkeypatch.setattr(progress, "work_of", work.__getitem__)
    headway = Headway([0])
    seen = [headway()]
    for pid in (1, 2, 3, 4):  # each ends when the next one begins, with as little work as the one before
        family[:] = [0, pid]
        seen.append(headway())
    assert seen == [1, 2, 3, 4, 5]
    for _ in range(9):
        work.update({pid: ticks + 10 for pid, ticks in work.items()})
    assert headway() == 5
    work[4] += 100
    assert headway() == 6
