"""Stack dumps of the processes of a program that hangs: each writes its stacks once, and is ended.

1. The kernel shows what every thread of each process waits in. Then the process is stopped, so that it starts no other,
   and does not see the end of another.
2. One after the other, children first, gets SIGABRT and goes on: `faulthandler` writes the Python stacks of its threads
   to its standard error, and it ends. The rest is killed, such as programs that are no Python.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from remesh.foundation.linux.procfs import children_of, read_stat, thread_ids

TELLING = {"PYTHONFAULTHANDLER": "1"}
"""Variables with which a Python tells its stacks on SIGABRT."""
_END_S = 5.0


def end_with_stacks(root: int, log: Path) -> None:
    """End a process and all that it has started; where they stood is put behind what is in the log, their stderr."""
    told: dict[int, str] = {}
    _stop(root, told)
    for pid, text in reversed(told.items()):
        with log.open("a") as file:
            file.write(text)
        for number in (signal.SIGABRT, signal.SIGCONT, signal.SIGKILL):
            if number == signal.SIGKILL:
                _wait_for_end(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _stop(pid: int, told: dict[int, str]) -> None:
    """Stop a process, then those that it had started by then."""
    with contextlib.suppress(OSError):  # it ended just now
        told[pid] = _describe(pid)
        os.kill(pid, signal.SIGSTOP)
        for child in children_of(pid):
            _stop(child, told)


def _describe(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    lines = [f"--- process {pid}, child of {read_stat(pid)[3]}: {command[:200]}"]
    for tid in thread_ids(pid):
        name, place, call = (_read(Path(f"/proc/{pid}/task/{tid}/{what}")) for what in ("comm", "wchan", "syscall"))
        lines.append(f"    thread {name}: in {place}, system call {call}")
    return "\n".join([*lines, ""])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return error.strerror or str(error)


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            select.select([handle], [], [], _END_S)
        finally:
            os.close(handle)
