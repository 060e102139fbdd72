"""Cleanup of processes that a run of tests leaves behind, however the run ends.

Tests start programs that start others, many in sessions of their own, and a run may be ended where none of its code
runs any more: by SIGKILL, or by faulthandler in a test that hangs. So a process beside it waits:

1. `watch` puts a mark of this run into the environment, which all that it starts inherit, and starts the process.
2. That one, without the mark and in a session of its own, waits for the end of the run.
3. It kills every process that has the mark, until there is none.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

_VARIABLE = "PYTEST_RUN_OF_REMESH"
_PAUSE_S = 0.05


def watch() -> None:
    """Let all that this process starts from now on end with it."""
    os.environ[_VARIABLE] = mark = uuid.uuid4().hex
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    watcher.returncode = 0  # it outlives this process, and nobody asks how it ended


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() == pid:  # else it was over before, and another has its number
        select.select([handle], [], [])


def _kill_marked(mark: str) -> bool:
    """Whether there was anybody to kill."""
    wanted = f"{_VARIABLE}={mark}".encode()
    found = False
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                found = True
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return found


def main(pid: int, mark: str) -> None:
    _wait_for_end(pid)
    while _kill_marked(mark):
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
