"""Elastic job on this machine for tests: agents as processes, a store that outlives them, faults on request.

Used by tests and by the demo. Nothing is simulated: nodes are killed with SIGKILL, and what is known about the job is
what its event logs hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from remesh.elasticity.telemetry.events import EventReader
from remesh.foundation.linux.procfs import work_of
from remesh.testbed.quiet_limit import QuietLimit
from remesh.wire.free_ports import free_port

POLL_S = 0.01
_END_GRACE_S = 5.0
"""How long an agent that is interrupted has to end."""

_WORKER = "worker-"
"""Before a worker's process id, in the name under which it logs events."""

Event = dict[str, Any]


class LocalJob:
    """Agents of one job, by node name. A context manager: whatever still runs at the end is interrupted, or killed.

    The store is this process's, and outlives all nodes; with ``hosts_store`` the first node hosts it instead.
    """

    def __init__(
        self,
        folder: Path,
        script: Sequence[str],
        *,
        nnodes: str = "1:2",
        workers_per_node: int = 2,
        hosts_store: bool = False,
    ) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._script = list(script)
        self._nnodes = nnodes
        self._workers_per_node = workers_per_node
        self._store = None if hosts_store else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._endpoint = f"127.0.0.1:{free_port() if self._store is None else self._store.port}"
        (folder / "events").mkdir(parents=True, exist_ok=True)
        self._reader = EventReader(folder / "events")
        self._num_shown = 0
        """Of the events, from the first, how many `follow` has shown: those that come together are shown one by one."""
        self._started: set[int] = set()
        """Processes of workers."""
        self._heard: set[int] = set()
        """Processes, agents too, that have logged an event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        running = {node: agent for node, agent in self.agents.items() if agent.poll() is None}
        for agent in running.values():
            # It takes its workers along, and what it made for itself.
            agent.send_signal(signal.SIGINT)
        for node, agent in running.items():
            try:
                agent.wait(_END_GRACE_S)
            except subprocess.TimeoutExpired:
                self.kill_node(node)

    def start_node(self, node: str, *options: str) -> None:
        """Start a node's agent; ``options`` are further flags of ``remesh run``."""
        command = [
            *(sys.executable, "-m", "remesh", "run", "--nnodes", self._nnodes, "--last-call", "30"),
            *("--nproc-per-node", str(self._workers_per_node), "--rdzv-endpoint", self._endpoint),
            *(
                "--rdzv-id",
                "local",
                *([] if self._store is None else ["--no-rdzv-host"]),
                "--node-name",
                node,
                "--events-dir",
                str(self.folder / "events"),
            ),
            *options,
            *self._script,
        ]
        self.agents[node] = self.start_agent(command, self.log_of(node))

    def start_agent(self, command: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
        """A process in a session of its own that appends to a log."""
        with path.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def log_of(self, node: str) -> Path:
        """The log file of a node's agent and workers."""
        return self.folder / f"{node}.log"

    def kill_node(self, node: str) -> float:
        """SIGKILL an agent and all its workers at once, as when a machine loses power; returns the time."""
        killed_s = time.time()
        for pid in [self.agents[node].pid, *self.worker_pids(node)]:
            _kill(pid)
        self.agents[node].wait()
        return killed_s

    def kill_worker(self, node: str, slot: int) -> float:
        """SIGKILL one worker; returns the time."""
        killed_s = time.time()
        _kill(self.worker_pids(node)[slot])
        return killed_s

    def preempt_node(self, node: str, quiet_s: float) -> None:
        """SIGTERM to an agent, as a platform sends before it takes the machine away; returns when its job knows.

        TimeoutError as `wait_for`.
        """
        self.agents[node].terminate()
        self.wait_for(lambda event: event["kind"] == "pause", quiet_s)

    def worker_pids(self, node: str) -> list[int]:
        """Processes of a node's workers, by slot."""
        self._poll()
        indices = [event["index"] for event in self.of_kind("agent", node=node)]
        started = self.of_kind("worker-started", who=f"agent-{indices[-1]}") if indices else []
        pids = {event["slot"]: event["pid"] for event in started}
        return [pids[slot] for slot in sorted(pids)]

    def of_kind(self, kind: str, **wanted: Any) -> list[Event]:
        """Events seen so far of a kind, with these values."""
        return [e for e in self.events if e["kind"] == kind and all(e.get(key) == one for key, one in wanted.items())]

    def follow(self, quiet_s: float) -> Iterator[Event]:
        """Events as they come, each once, until all agents have ended.

        TimeoutError, with the logs' ends, once nothing has happened for ``quiet_s``: no event, no line in a log, no
        work of a process that is still starting.
        """
        limit = QuietLimit(self._progress, quiet_s)
        running = True
        while running:
            if limit.is_over():
                raise TimeoutError(f"the job got nowhere for {quiet_s:g} s\n{self.describe_logs()}")
            running = any(agent.poll() is None for agent in self.agents.values())
            self._poll()
            while self._num_shown < len(self.events):
                self._num_shown += 1
                yield self.events[self._num_shown - 1]
            time.sleep(POLL_S)

    def wait_for(self, is_it: Callable[[Event], bool], quiet_s: float) -> Event:
        """The first event of which ``is_it`` is true, after those that were waited for before."""
        for event in self.follow(quiet_s):
            if is_it(event):
                return event
        raise TimeoutError(f"the job ended without the event that was waited for\n{self.describe_logs()}")

    def wait(self, quiet_s: float) -> dict[str, int]:
        """Exit codes of all agents, once they have ended."""
        for _ in self.follow(quiet_s):
            pass
        return {node: agent.wait() for node, agent in self.agents.items()}

    def describe_logs(self, num_lines: int = 30) -> str:
        """The ends of all nodes' logs, for a message."""
        ends = []
        for node in self.agents:
            lines = self.log_of(node).read_text(errors="replace").splitlines()[-num_lines:]
            ends.append("\n".join([f"--- {node}", *lines]))
        return "\n".join(ends)

    def _progress(self) -> tuple[int, ...]:
        """Numbers of which one changes while the job gets anywhere."""
        started = self._started.union(agent.pid for agent in self.agents.values())
        logs = [self.log_of(node).stat().st_size for node in self.agents]
        # Agents that wait look around all the time: work counts only of those that have logged nothing yet.
        return len(self.events), *logs, sum(work_of(pid) for pid in started - self._heard)

    def _poll(self) -> None:
        new = self._reader.poll()
        self.events += new
        for event in new:
            if event["kind"] == "worker-started":
                self._started.add(event["pid"])
            elif event["kind"] == "agent":
                self._heard.add(event["pid"])
            elif event["who"].startswith(_WORKER):
                self._heard.add(int(event["who"].rpartition("-")[2]))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
