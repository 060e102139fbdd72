"""Runner of MPICH's own test suite on the library: ``make mpich-suite``, or by hand.

    python -m tests.mpi.mpich_suite FOLDER [PART ...] [--beside] [--way carried|renewed|native] [--most-ranks 4]
                                    [--patience 120] [--out FILE]

FOLDER holds the suite (``test/mpi`` of MPICH's source), configured and built with an MPI's ``mpicc``; a PART is a
folder of it (``coll``), or a test (``coll/allred``); none: all that is built. What is run, with how many ranks, and
what must come out, stands in the lists (``testlist``). Each test is a job of its own, so that one that never ends
takes no other with it:

    carried     on the library, by a lower half under MPICH
    renewed     so, while lower halves are renewed again and again
    native      under the MPI that it was built with, without us: what a test should do

With ``--beside`` a test that does not pass is run natively, too. Prints what failed, by name and with its output, and
counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import remesh
from remesh.carried.mpi.launch import SHM, Reach, plan_start
from remesh.carried.mpi.mpis import find_mpi
from remesh.foundation.linux.calls import PR_SET_CHILD_SUBREAPER, prctl
from remesh.testbed.quiet_limit import QuietLimit
from tests.mpi.mpi4py_suite import end_descendants

_HERE: Final = Path(__file__).parent
_LOOK_S: Final = 0.02
_RENEW_S: Final = "0.04"
_PASSED: Final = re.compile(r"\s*No [Ee]rrors\s*")
_OURS: Final = re.compile(r"\s*(Test Passed|FORTRAN STOP.*|renewed \d+ times|)\s*")
"""Other lines than the one of success that a test which passed may print, and lower halves that are renewed."""
_LISTS: Final = ("testlist", "testlist.dtp")
_LEFT_OUT: Final = {
    "spawn": "the number of ranks is fixed",
    "ft": "a job that loses a rank is restarted",
    "faults": "a job that loses a rank is restarted",
    "ckpoint": "checkpoints of MPICH's own",
    "impls": "functions of MPICH alone",
    "perf": "measures time",
    "dtpools": "no tests",
    "util": "no tests",
}
"""Folders of the suite, and why."""
_MUST_FAIL: Final = ("TestStatus", "TestErrFatal")
_MOST_MEMORY_GB: Final = 4.0
"""Tests that ask for more are left out."""
_MOST_RANKS_ASKED: Final = 16
"""A test that fails with few ranks gets as many as it asks for, but not more."""


@dataclass(frozen=True, slots=True)
class Test:
    """One line of a list."""

    folder: str
    """Below the suite's."""
    program: str
    num_ranks: int
    arguments: tuple[str, ...]
    variables: tuple[str, ...]
    """``NAME=value`` each."""
    must_fail: bool
    """Whether it is to end with an error."""
    known_to_fail: str
    """Why MPICH itself is known to fail; empty if it passes."""
    num_asked: int = field(default=0, compare=False)
    """Ranks for which it was written."""

    @property
    def name(self) -> str:
        """As this module prints it."""
        return " ".join((f"{self.folder}/{self.program}", f"-n {self.num_ranks}", *self.arguments, *self.variables))


def read_line(folder: str, line: str, most_ranks: int) -> Test | None:
    """A test of a list's line; None if there is none on it, or one that asks for too much memory.

    >>> read_line("coll", "allred 7 arg=-count=10 # so many", 4).name
    'coll/allred -n 4 -count=10'
    """
    words = line.split("#")[0].split()
    if not words or any(word.startswith("mem=") and float(word[4:]) > _MOST_MEMORY_GB for word in words):
        return None
    options = [word.partition("=")[::2] for word in words[2:]]
    several = {key: tuple(value for name, value in options if name == key) for key in ("arg", "env")}
    single = dict(options)
    asked = int(words[1]) if len(words) > 1 else 2
    return Test(
        folder,
        words[0],
        min(asked, most_ranks),
        several["arg"],
        several["env"],
        single.get("resultTest") in _MUST_FAIL,
        single.get("xfail", ""),
        asked,
    )


def read_tests(suite: Path, folder: str, most_ranks: int) -> Iterator[Test]:
    """The tests of a folder's lists, and of the folders that they name; those that differ in their ranks alone once."""
    seen = set()
    for path in (suite / folder / name for name in _LISTS):
        for line in path.read_text().splitlines() if path.exists() else ():
            test = read_line(folder, line, most_ranks)
            if test is None or test in seen:
                continue
            seen.add(test)
            below = f"{folder}/{test.program}"
            if not (suite / below).is_dir():
                yield test
            elif test.program not in _LEFT_OUT:
                yield from read_tests(suite, below, most_ranks)


def parts_of(suite: Path) -> list[str]:
    """The folders of the suite that have tests, but for those that are left out."""
    return sorted(path.parent.name for path in suite.glob("*/testlist") if path.parent.name not in _LEFT_OUT)


def with_enough_ranks(test: Test, suite: Path, options: argparse.Namespace, way: str) -> tuple[Test, str, str]:
    """The test as it was run last, how it ended, and what it said."""
    outcome, said = run_test(test, suite, options, way)
    if outcome == "failed" and test.num_ranks < test.num_asked <= _MOST_RANKS_ASKED:
        test = replace(test, num_ranks=test.num_asked)
        outcome, said = run_test(test, suite, options, way)
    return test, outcome, said


def run_test(test: Test, suite: Path, options: argparse.Namespace, way: str) -> tuple[str, str]:
    """How a test ended, and what it said: ``passed``, ``failed``, ``endless`` or ``unbuilt``."""
    program = suite / test.folder / test.program
    if not program.exists():
        return "unbuilt", ""
    environment = {**os.environ, **dict(variable.split("=", 1) for variable in test.variables)}
    command = [*shlex.split(options.mpiexec), "-n", str(test.num_ranks), str(program)]
    if way != "native":
        mpi = find_mpi(options.mpi)
        renew = ("--renew", _RENEW_S) if way == "renewed" else ()
        alone = (mpi.python, str(_HERE / "lower_alone.py"), *renew, str(program))
        start = plan_start(mpi, SHM, test.num_ranks, (), Reach(), alone)
        source = str(Path(remesh.__file__).parents[1])
        command = [*start.command]
        environment |= {**start.environment, "PYTHONPATH": source, "UPPER_PYTHON": "", "UPPER_FACE": options.face}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        job = subprocess.Popen(
            [*command, *test.arguments],
            cwd=program.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        limit = QuietLimit(lambda: os.fstat(output.fileno()).st_size, options.patience)
        try:
            while job.poll() is None and not limit.is_over():
                time.sleep(_LOOK_S)
            is_endless = job.poll() is None
        finally:
            end_descendants()
            job.wait()
        output.seek(0)
        said = output.read()
    if is_endless:
        return "endless", said
    return ("passed" if is_success(test, job.returncode, said) else "failed"), said


def is_success(test: Test, status: int, said: str) -> bool:
    """Whether a test did what it should, by the rules of the suite."""
    if test.must_fail:
        return status != 0
    lines = [line for line in said.splitlines() if not _OURS.fullmatch(line)]
    return status == 0 and len(lines) == 1 and _PASSED.fullmatch(lines[0]) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; 1 when one failed or never ended that passes natively, or that MPICH is not known to fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--way", default="carried", choices=("carried", "renewed", "native"))
    parser.add_argument("--beside", action="store_true", help="what does not pass natively, too")
    parser.add_argument("--mpi", default="mpich", help="under which lower halves run")
    parser.add_argument("--face", default="mpich", choices=("mpich", "openmpi"), help="for which the suite was built")
    parser.add_argument("--mpiexec", default="mpiexec.mpich", help="launcher of native runs")
    parser.add_argument("--most-ranks", type=int, default=4)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without a word, after which it ends")
    parser.add_argument("--out", type=Path, help="a file for all outcomes, as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    suite = options.folder.resolve()
    # A test is found in its folder's list.
    parts = options.parts or parts_of(suite)
    folders = dict.fromkeys(part if (suite / part).is_dir() else str(Path(part).parent) for part in parts)
    found: dict[str, tuple[str, str]] = {}
    natively: dict[str, str] = {}
    known: set[str] = set()
    for folder in folders:
        tests = [
            test
            for test in read_tests(suite, folder, options.most_ranks)
            if folder in parts or f"{test.folder}/{test.program}" in parts
        ]
        counts: Counter[str] = Counter()
        for listed in tests:
            began_s = time.monotonic()
            test, outcome, said = with_enough_ranks(listed, suite, options, options.way)
            took_s = time.monotonic() - began_s
            native = ""
            if options.beside and outcome in ("failed", "endless"):
                native, _ = run_test(test, suite, options, "native")
            counts[outcome] += 1
            found[test.name], natively[test.name] = (outcome, said[-2000:]), native
            if test.known_to_fail or native in ("failed", "endless"):
                known.add(test.name)
            if outcome != "passed":
                why = f" (MPICH, too: {test.known_to_fail})" if test.known_to_fail else ""
                beside = f" (natively {native})" if native else ""
                print(f"    {outcome}{beside}: {test.name}{why} {took_s:.1f} s", flush=True)
                for line in said.strip().splitlines()[:6]:
                    print(f"        {line[:200]}", flush=True)
            if options.out:
                told = {name: (*found[name], natively[name]) for name in found}
                options.out.write_text(json.dumps(told, indent=1))
        print(f"{folder}:", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
    failed = {name for name, (outcome, _) in found.items() if outcome in ("failed", "endless")}
    return int(not failed <= known)


if __name__ == "__main__":
    sys.exit(main())
