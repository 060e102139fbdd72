"""A job on this machine whose agents are forked of a process that has torch already: each starts two seconds sooner."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remesh.testing.local_job import LocalJob
from tests.procs.forked_programs import start


class _Agent:
    """As `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("an agent", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedJob(LocalJob):
    """Its agents start their workers as in any job. What an agent looks like from outside is a forked Python."""

    def start_agent(self, command: Sequence[str], path: Path) -> Any:
        path.touch()
        _, _, *words = command  # python -m
        return _Agent(start(words, Path.cwd(), {}, path, path))
