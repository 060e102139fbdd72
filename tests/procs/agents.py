"""Agents of ``remesh run`` as processes, for tests of restart mode. They are forked of one that has torch already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from remesh.foundation.linux.procfs import children_of, start_of, work_of
from remesh.testbed.quiet_limit import QuietLimit
from remesh.wire.listening import is_listening
from tests.procs.forked_programs import ForkedProgram, start
from tests.procs.scripts import plain

SCRIPT = str(Path(plain.__file__))
TIMEOUT_S = 60.0


Agent = ForkedProgram | subprocess.Popen[bytes]


class Agents:
    """A context manager: agents that still run at its end are killed, with their workers."""

    def __init__(self, folder: Path, launcher: str = "remesh.run") -> None:
        self.folder = folder
        self.told = folder / "told"
        self.told.mkdir()
        self._launcher = launcher
        self.agents: list[Agent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker["pid"], signal.SIGKILL)
        for agent in self.agents:
            agent.kill()
            agent.wait(TIMEOUT_S)

    def start(self, *flags: str, actions: Sequence[str] = (), script: str = SCRIPT, **environment: str) -> int:
        """Start one agent; returns its place in :attr:`agents`."""
        mode = ("--mode", "restart") if self._launcher == "remesh.run" else ()
        words = ["-m", self._launcher, *mode, *flags, script, str(self.told), *actions]
        index = len(self.agents)
        log = self._log_of(index)
        log.touch()
        variables = {**os.environ, "TMPDIR": str(self.folder), **environment}
        self.agents.append(self.start_agent(words, variables, log))
        return index

    def start_agent(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> Agent:
        """A process that appends to a log."""
        return start(words, Path.cwd(), variables, log, log)

    def end(self, index: int = 0) -> tuple[int, str]:
        """Exit code and output of an agent, once it has ended."""
        limit = QuietLimit(lambda: (len(self.output(index)), len(self.workers()), self._work_of_silent()), TIMEOUT_S)
        while (code := self.agents[index].poll()) is None:
            assert not limit.is_over(), f"agent {index} does not end\n{self.output(index)}"
            time.sleep(0.02)
        return code, self.output(index)

    def output(self, index: int) -> str:
        """What an agent and its workers have printed so far."""
        return self._log_of(index).read_text()

    def _log_of(self, index: int) -> Path:
        return self.folder / f"agent-{index}.log"

    def workers(self) -> list[dict[str, Any]]:
        """What workers told so far, in the order of their starts."""
        return [json.loads(path.read_text()) for path in sorted(self.told.glob("[0-9]*.json"))]

    def wait_for_workers(self, count: int) -> list[dict[str, Any]]:
        """What workers told, once so many have started."""
        limit = QuietLimit(lambda: (len(self.workers()), self._work_of_silent()), TIMEOUT_S)
        while len(found := self.workers()) < count:
            assert not limit.is_over(), f"{len(found)} of {count} workers started"
            for index, agent in enumerate(self.agents):
                assert agent.poll() in (None, 0, -signal.SIGKILL), self.output(index)
            time.sleep(0.02)
        return found

    def wait_for_world(self, size: int) -> list[dict[str, Any]]:
        """What the newest workers told, once they are a world of that size: a slow machine first has a smaller one."""
        count = size
        while True:
            found = self.wait_for_workers(count)
            if {worker["WORLD_SIZE"] for worker in found[-size:]} == {str(size)}:
                return found[-size:]
            count = len(found) + 1

    def _work_of_silent(self) -> int:
        """What agents have done that have started nobody yet, and those whom they started and that told nothing."""
        silent: set[int] = set()
        for agent in self.agents:
            if agent.poll() is None:
                silent.update(children_of(agent.pid) or [agent.pid])
        return sum(work_of(pid) for pid in silent - {worker["pid"] for worker in self.workers()})

    def wait_for_store(self, port: int) -> None:
        """Return when somebody listens on a port of loopback."""
        limit = QuietLimit(self._work_of_silent, TIMEOUT_S)
        while not is_listening("127.0.0.1", port):
            assert not limit.is_over(), f"nobody listens on port {port}"
            time.sleep(0.02)

    def leftovers(self) -> list[str]:
        """Worker processes that still run, and what agents left in the folder for temporary files."""
        running = [f"pid {worker['pid']}" for worker in self.workers() if start_of(worker["pid"]) is not None]
        # torch may make a cache of its own there.
        ours = [path.name for path in self.folder.iterdir() if path.name.startswith(("remesh", "torchelastic"))]
        return running + ours


class PlainAgents(Agents):
    """Agents that Python starts: they have what their environment alone gives them."""

    def start_agent(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> Agent:
        with log.open("ab") as file:
            return subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, env=variables)


def meeting_flags(port: int, nnodes: str = "2", backend: str = "c10d", **conf: object) -> list[str]:
    """Flags of a node of a job that meets on loopback."""
    settings = {"join_timeout": 100, "last_call_timeout": 1, **conf}
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    return [
        *("--nnodes", nnodes, "--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
        *("--rdzv-conf", text, "--local-addr", "127.0.0.1", "--shutdown-timeout", "5"),
    ]


def last_event_of_agent(output: str) -> dict[str, Any]:
    """The last that ``--event-log-handler console`` told of an agent, in what it printed."""
    told = [line[line.index("{") :] for line in output.splitlines() if '"source": "AGENT"' in line]
    assert told, output
    event: dict[str, Any] = json.loads(told[-1])
    return event
