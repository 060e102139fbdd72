"""Fuzzer of carried programs: random ones get what they get from a real MPI alone.

``python -m tests.mpi.hunt --seeds 100-160 --steps 200 --ranks 2-4``: for each seed ``programs/at_random.py`` runs

    native      under MPICH without us: what it should get
    renewed     on the library, its lower half renewed again and again while it runs (``lower_alone.py``)
    restarted   as a job that is stopped at random moments and goes on under another MPI and network, from its last
                checkpoint or from the one before that, at some of which it was not stopped

The seed also draws the number of ranks, the moments and the settings. What differs, fails or hangs is reported with the
fewest steps that fail, and with the command that repeats them. When ranks run is not drawn: a command may be needed
more than once.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from remesh.carried.mpi.launch import ROWS, SHM, Reach, plan_start
from remesh.carried.mpi.mpi_job import Placement, RunSettings
from remesh.carried.mpi.mpis import KINDS, find_mpi
from remesh.carried.rounds.leader import Coordinator
from remesh.testbed.quiet_limit import QuietLimit
from tests.mpi.conftest import PROGRAMS, Job
from tests.mpi.patience import QUIET_S

_PLACES = [(row.mpi, row.network) for row in ROWS if row.one_host is not None]
_STEP = re.compile(r"rank (\d+) step (\d+) (\S+) ([0-9a-f]{8})")
_LOOK_S = 0.1
_MOST_STAYS = 12
_INTERRUPTED = 130
"""Exit code of a stay whose SIGINT was meant for the hunter."""
_MOST_ERRORS = 500
"""Characters of what a run says besides its steps."""
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Program:
    """A program at random, and how long it may take."""

    seed: int
    steps: int
    num_ranks: int
    without: str
    """Kinds of steps that it has not; as at_random.py takes it."""

    @property
    def arguments(self) -> list[str]:
        """Of at_random.py."""
        return [str(self.seed), str(self.steps), "0.02", "--without", self.without]

    def chance(self, purpose: str) -> random.Random:
        """A generator for each purpose, so that runs can be repeated one by one."""
        return random.Random(f"{self.seed} {purpose}")


@dataclass
class Seen:
    """What a run has shown."""

    text: str
    """All that its ranks printed."""
    problem: str = ""
    """Why it did not end well; empty if it did."""
    caught: Counter[str] = field(default_factory=Counter)
    """What its checkpoints, or renewals, went through the middle of."""

    @property
    def steps(self) -> dict[tuple[int, int], tuple[str, str]]:
        """Kind and digest of each step and rank."""
        return {(int(step), int(rank)): (kind, digest) for rank, step, kind, digest in _STEP.findall(self.text)}


@dataclass(frozen=True)
class Fault:
    """A run that was not as it should be."""

    what: str
    steps: int
    """A program of so many steps, and no fewer, has it."""


def compare(expected: Seen, found: Seen) -> Fault | None:
    """Whether a run got what another one did.

    >>> compare(Seen("rank 0 step 0 a.b 00000000"), Seen("rank 0 step 0 a.b 00000001"))
    Fault(what='rank 0 got something else in step 0, a.b', steps=1)
    >>> compare(Seen("rank 0 step 0 a.b 00000000"), Seen("rank 0 step 0 a.b 00000000", "it hangs"))
    Fault(what='it hangs', steps=2)
    """
    steps = found.steps
    for (step, rank), (kind, digest) in sorted(expected.steps.items()):
        got = steps.get((step, rank))
        if got is not None and got != (kind, digest):
            return Fault(f"rank {rank} got something else in step {step}, {kind}", step + 1)
    missing = len(expected.steps) - len(steps)
    if not found.problem and not missing:
        return None
    furthest = max((step for step, _ in steps), default=-1)
    return Fault(found.problem or f"{missing} lines are missing", furthest + 2)


# --- three ways to run it ---


def run_native(program: Program, mpi: str = "mpich") -> Seen:
    """Under a real MPI, without us."""
    numeric = str(Path(np.__file__).resolve().parents[1])
    return _launch(program, mpi, [str(PROGRAMS / "at_random.py"), *program.arguments], {"PYTHONPATH": numeric})


def run_renewed(program: Program) -> Seen:
    """On the library, by lower halves that come and go."""
    chance = program.chance("renewed")
    mpi, period = chance.choice(KINDS), chance.choice(("0.02", "0.05", "0.2"))
    variables = chance.choice(({}, {}, {"REMESH_WIRE_PROBES": "1"}, {"REMESH_WIRE_DIRECT": "1"}))
    source = str(Path(__file__).parents[2] / "src")
    environment = {"PYTHONPATH": source, "UPPER_PYTHON": sys.executable, **variables}
    alone = str(PROGRAMS.parent / "lower_alone.py")
    seen = _launch(
        program, mpi, [alone, "--renew", period, str(PROGRAMS / "at_random.py"), *program.arguments], environment
    )
    renewed = re.search(r"renewed (\d+) times", seen.text)
    seen.caught["renewals"] = int(renewed[1]) if renewed else 0
    return seen


def _launch(program: Program, mpi: str, command: Sequence[str], environment: dict[str, str]) -> Seen:
    installation = find_mpi(mpi)
    start = plan_start(installation, SHM, program.num_ranks, (), Reach(), (installation.python, *command))
    everything = {**os.environ, **_THREADS, **start.environment, **environment}
    with tempfile.TemporaryDirectory(prefix="remesh-hunt-") as folder:
        said = Path(folder) / "said"
        with said.open("w") as output:
            launcher = subprocess.Popen(
                start.command, cwd=folder, env=everything, stdout=output, stderr=subprocess.STDOUT
            )
        limit = QuietLimit(lambda: said.stat().st_size, QUIET_S)
        while launcher.poll() is None and not limit.is_over():
            time.sleep(_LOOK_S)
        if is_running := launcher.poll() is None:
            launcher.terminate()
            launcher.wait(timeout=60)
        text = said.read_text()
    if is_running:
        return Seen(text, f"it hangs, under {mpi}{_errors(text)}")
    problem = f"it ended with {launcher.returncode}, under {mpi}{_errors(text)}"
    return Seen(text, problem if launcher.returncode else "")


def _errors(text: str) -> str:
    """What else than steps was printed, the last of it."""
    return f"; {' '.join(_STEP.sub('', text).split())[-_MOST_ERRORS:]}"


def run_restarted(program: Program) -> Seen:
    """As a job that goes from MPI to MPI, until it ends."""
    chance = program.chance("restarted")
    goes_back = "files" in program.without and chance.random() < 0.5
    settings = RunSettings(keep=3, incremental=chance.random() < 0.3, compress=chance.random() < 0.2)
    shared = chance.choice("01")
    seen = Seen("")
    with tempfile.TemporaryDirectory(prefix="remesh-hunt-") as folder:
        job = Job(Path(folder) / "job")
        variables = {"REMESH_SHARED_ARRAYS": shared}
        job.create("at_random", *program.arguments, num_ranks=program.num_ranks, **variables)
        checkpoint, path = None, []
        for number in range(_MOST_STAYS):
            mpi, network = chance.choice(_PLACES)
            path.append(f"{mpi} {network}")
            # The first is early, so that short programs are stopped, too.
            latest_s = 1.2 if number else 0.4
            moments_s = sorted(chance.uniform(0.1, latest_s) for _ in range(chance.choice((1, 1, 2))))
            watch = stopper([] if number == _MOST_STAYS - 1 else moments_s)
            stay = job.stay(Placement(mpi, network), settings=settings, checkpoint=checkpoint, watch=watch)
            if stay.outcome.exit_code == _INTERRUPTED:
                raise KeyboardInterrupt
            if stay.last_checkpoint is not None:
                seen.caught.update(stay.last_checkpoint["caught"])  # type: ignore[arg-type]
            if stay.outcome.state != "stopped":
                break
            numbers = [each.number for each in job.folder.checkpoints()]
            is_back = goes_back and len(numbers) > 1 and chance.random() < 0.3
            checkpoint = job.folder.checkpoint(numbers[-2] if is_back else None)
        seen.caught["checkpoints"] = job.events.count(": committed: ")
        seen.text = "".join(each.read_text() for each in sorted(job.folder.logs.glob("rank-*.out")))
        if stay.outcome.state != "finished":
            errors = "".join(each.read_text() for each in sorted(job.folder.logs.glob("rank-*.err")))
            seen.problem = f"{stay.outcome.cause}; it went over {', '.join(path)}{_errors(errors)}"
    return seen


def stopper(moments_s: Sequence[float]) -> Callable[[Coordinator], None]:
    """Asks for checkpoints so long after all ranks have come up, the last of which stops."""
    ready_s = 0.0
    left_s = list(moments_s)

    def watch(coordinator: Coordinator) -> None:
        nonlocal ready_s
        now_s = time.monotonic()
        if left_s and coordinator.all_ready:
            ready_s = ready_s or now_s
            if now_s - ready_s >= left_s[0]:
                del left_s[0]
                coordinator.request_checkpoint(stop=not left_s)

    return watch


WAYS: dict[str, Callable[[Program], Seen]] = {"renewed": run_renewed, "restarted": run_restarted}


def hunt(program: Program, ways: Sequence[str]) -> tuple[list[str], Counter[str]]:
    """What is wrong, one text for each way in which something is; and what was caught in all."""
    expected = run_native(program)
    if expected.problem:
        return [f"native: {expected.problem}"], Counter()
    wrong, caught = [], Counter[str]()
    for way in ways:
        found = WAYS[way](program)
        caught.update(found.caught)
        fault = compare(expected, found)
        if fault is not None:
            again = f"--seeds {program.seed} --steps {min(fault.steps, program.steps)} --ranks {program.num_ranks}"
            again += f" --ways {way}" + (f" --without {program.without}" if program.without else "")
            wrong.append(f"{way}: {fault.what}\n    python -m tests.mpi.hunt {again}")
    return wrong, caught


def _span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    """Hunt; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_span, default=range(20))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=_span, default=range(2, 5))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--without", default="", help="kinds of steps to leave out; files, for jobs that may go back")
    options = parser.parse_args()
    # Launchers of jobs write to our output what the ranks print.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    total, num_wrong = Counter[str](), 0
    for seed in options.seeds:
        num_ranks = random.Random(f"{seed} ranks").choice(options.ranks)
        program = Program(seed, options.steps, num_ranks, options.without)
        began_s = time.monotonic()
        wrong, caught = hunt(program, options.ways.split(","))
        total.update(caught)
        num_wrong += bool(wrong)
        took = f"{num_ranks} ranks {time.monotonic() - began_s:4.0f} s"
        print(f"seed {seed}: {took} {'WRONG' if wrong else 'same'}", *wrong, sep="\n  ", file=report, flush=True)
    print(f"{len(options.seeds)} seeds, {num_wrong} wrong; {dict(total)}", file=report)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
