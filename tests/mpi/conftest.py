"""Jobs for the tests that carry programs; the programs themselves are no tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import remesh
from remesh.carried.mpi.mpi_job import JobRun, Placement, RunSettings, Watch, run_job_once
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, JobSpec
from remesh.carried.rounds.leader import Coordinator
from tests.mpi.patience import Patience
from tests.support.log_lines import log_lines

collect_ignore_glob = ["programs/*", "lower_alone.py", "missing_names.py"]

PROGRAMS = Path(__file__).parent / "programs"
FOREIGN = Path(__file__).parents[2] / ".mpi" / "programs"
"""Packages of others, from `make mpi`."""
_LONGEST_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What gets nowhere is given up by who waits for it (`tests.mpi.patience`); this is for what no one waits for."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LONGEST_S))


class Job:
    """One job folder and its stays; programs come from ``programs/``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.gate = path.parent / "gate"
        """A file that is there when a program of ours may do its last step: see ``programs/gate.py``."""
        self.gated = {"TEST_GATE": str(self.gate)}
        """What the environment of such a program has."""
        self.said: list[str] = []

    def create(self, program: str | Path, *arguments: object, num_ranks: int = 4, **variables: str) -> None:
        """Make the folder for a program, with more variables in its environment; a path is that of a binary."""
        command = [program] if isinstance(program, Path) else [sys.executable, PROGRAMS / f"{program}.py"]
        argv = tuple(map(str, [*command, *arguments]))
        environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(FOREIGN), **self.gated, **variables}
        self.folder = JobFolder.create(self._path, JobSpec(argv, num_ranks, str(self._path.parent), environment))

    def stay(
        self,
        placement: Placement | str,
        *,
        settings: RunSettings | None = None,
        checkpoint: Checkpoint | None = None,
        watch: Watch | None = None,
    ) -> JobRun:
        """Run it until it ends or stops, or gets nowhere; a program that is watched ends when its gate is opened."""
        placed = Placement(placement) if isinstance(placement, str) else placement
        if watch is None:
            self.gate.touch()
        else:
            self.gate.unlink(missing_ok=True)
        patience = Patience(self.folder)

        def look(coordinator: Coordinator) -> None:
            patience(coordinator)
            if watch is not None:
                watch(coordinator)

        with log_lines("remesh.carried") as lines:
            self.said = lines
            return run_job_once(self.folder, placed, settings or RunSettings(), checkpoint, look)

    @property
    def answer(self) -> str | None:
        """What rank 0 printed as its answer."""
        lines = (self.folder.logs / "rank-0000.out").read_text().splitlines()
        answers = [line for line in lines if line.startswith("answer ")]
        assert len(answers) <= 1, answers
        return answers[0] if answers else None

    @property
    def events(self) -> str:
        """The log of events."""
        return (self.folder.logs / "events.log").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """An empty job."""
    return Job(tmp_path / "job")


@pytest.fixture
def remesh_cli(tmp_path: Path, job: Job) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The command line in a process of its own; what still runs at the end is ended."""
    started = []
    places = os.pathsep.join([str(Path(remesh.__file__).parents[1]), str(FOREIGN)])
    environment = {**os.environ, "PYTHONPATH": places, "REMESH_JOBS": str(tmp_path), **job.gated}

    def start(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "remesh", "mpi", *arguments]
        output = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # its pipe is closed, which nobody may have read
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=30)


def ending_once(job: Job, is_so: Callable[[Coordinator], bool], watch: Watch | None = None) -> Watch:
    """The program may end once that is so; another watch goes on."""

    def look(coordinator: Coordinator) -> None:
        if watch is not None:
            watch(coordinator)
        if is_so(coordinator):
            job.gate.touch()

    return look


def stop_after(seconds: float, *, stop: bool = True) -> Watch:
    """Ask for one checkpoint, some time after all ranks have come up."""
    ready_s: list[float] = []

    def watch(coordinator: Coordinator) -> None:
        if coordinator.all_ready and not ready_s:
            ready_s.append(time.monotonic())
        if len(ready_s) == 1 and time.monotonic() - ready_s[0] >= seconds:
            ready_s.append(0.0)
            coordinator.request_checkpoint(stop=stop)

    return watch
