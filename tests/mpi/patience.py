"""Timeout of carried programs, counted from their last work, not from the start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, TimeoutExpired
from typing import IO, AnyStr, Final

from remesh.carried.rounds.job_folder import JobFolder
from remesh.carried.rounds.leader import Coordinator
from remesh.foundation.linux.procfs import family_of, work_of
from remesh.testbed.quiet_limit import QuietLimit

QUIET_S: Final = 100.0
"""A machine that runs ten other things gives every program some work within it."""
_LOOK_S: Final = 1.0


def work_below(pid: int) -> int:
    """Of all that a process has started, and they; not its own."""
    return sum(map(work_of, family_of(pid)[1:]))


def run_patiently(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None, stdin: int | IO[str] = DEVNULL
) -> CompletedProcess[str]:
    """Run a program to its end, however slow the machine is."""
    with Popen(command, env=environment, cwd=folder, stdin=stdin, stdout=PIPE, stderr=PIPE, text=True) as program:
        try:
            said, errors = communicate_patiently(program)
        except BaseException:
            program.kill()
            raise
    return CompletedProcess(command, program.returncode, said, errors)


def communicate_patiently(program: Popen[AnyStr]) -> tuple[AnyStr, AnyStr]:
    """What a program says until its end; TimeoutExpired if nothing that was started here works any more."""
    limit = _limit_for_all()
    while True:
        try:
            return program.communicate(timeout=_LOOK_S)
        except TimeoutExpired:
            if limit.is_over():
                raise


def wait_until(is_so: Callable[[], bool], tell: Callable[[], object] = str, pace_s: float = 0.05) -> None:
    """AssertionError, with what is told, if nothing that was started here works any more before it is so.

    A look that starts a program is work itself: such a wait has the limit of its test alone.
    """
    limit = _limit_for_all()
    while not is_so():
        assert not limit.is_over(), tell()
        time.sleep(pace_s)


def _limit_for_all() -> QuietLimit:
    return QuietLimit(lambda: work_below(os.getpid()), QUIET_S)


class Patience:
    """Ends a stay that gets nowhere, as a part of its watch.

    A program that waits in MPI does not work; its lower half, which looks around, is not asked once all have started.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._coordinator: Coordinator | None = None
        self._limit = QuietLimit(self._progress, QUIET_S)
        self._next_look_s = 0.0

    def __call__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        if self._limit.is_over():
            coordinator.fail(f"it got nowhere for {QUIET_S:g} s: {coordinator.describe()}")

    def _progress(self) -> tuple[int, ...]:
        assert self._coordinator is not None
        pids = [rank["pid"] for rank in self._coordinator.describe()["ranks"]]
        logs = [_size_of(path) for path in sorted(self._folder.logs.glob("*"))]
        return *logs, sum(map(work_below, pids if self._coordinator.all_ready else [os.getpid()]))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
