"""A job that is hurt: two nodes, on a testbed where there is one, with a store and a disk of their own.

A *life* is one stay of all agents with one store. When a life ends by a fault that may end it, the job is started
again, as a platform would, and goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from remesh.elasticity.telemetry.events import EventReader
from remesh.testbed import BedSpec, Testbed
from remesh.wire.free_ports import free_port

NODES = ("a", "b")
NUM_SLOTS = 2
FULL_SIZE = len(NODES) * NUM_SLOTS
STORE_HOST = "store"
MARK = "REMESH_CHAOS_MARK"
"""A variable that all processes of a job inherit: whoever still has it in the end was left behind."""
MPI_ROOMS = ("remesh-rank-", "remesh-test-")
"""How files in shared memory of MPI programs begin, which may run on the same machine: never of a job like these."""
FLAGS = ("--max-restarts", "1000", "--leave-timeout", "5", "--hang-timeout", "8", "--last-call", "20")
DISK_MIB = 8
_STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""

Event = dict[str, Any]


def can_make_networks() -> bool:
    """Whether this machine lets us make hosts and disks."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "mount"))


class HurtJob:
    """All lives of one job; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, script: list[str]) -> None:
        self.folder = folder
        self.stop_file = folder / "stop"
        self.disk = folder / "disk"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._script = [*script, "--stop", str(self.stop_file), "--checkpoint", str(self.disk / "checkpoints")]
        self.bed: Testbed | None = None
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.lives: list[list[Event]] = []
        self.timers: list[threading.Timer] = []
        self._readers: list[EventReader] = []
        self._store: subprocess.Popen[bytes] | None = None
        self._port = 29500
        self._has_disk = False

    def __enter__(self) -> Self:
        self.disk.mkdir(parents=True)
        (self.folder / "tmp").mkdir()
        if can_make_networks():
            self.bed = Testbed(BedSpec.parse(",".join(f"{name}=full" for name in (*NODES, STORE_HOST))))
            self.bed.start()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)]
            self._has_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self.timers:
            timer.cancel()
        self.end_life()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.bed is not None:
            self.bed.close()
        if self._has_disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=False, capture_output=True)

    # --- lives ---

    def start_life(self) -> None:
        """A store and agents on all nodes, with logs of their own."""
        if self.bed is None:
            self._port = free_port()
        life = self.folder / f"life-{len(self.lives)}"
        (life / "events").mkdir(parents=True)
        self.lives.append([])
        self._readers.append(EventReader(life / "events"))
        self._store = self._start(STORE_HOST, [sys.executable, "-c", _STORE, str(self._port)], "store", piped=True)
        assert self._store.stdout is not None and self._store.stdout.readline(), "the store did not start"
        for node in NODES:
            self.start_node(node)

    def end_life(self) -> None:
        """Kill what still runs of it."""
        self.poll()
        for node in self.agents:
            self.kill_node(node)
        self.kill_store()

    def start_node(self, node: str) -> None:
        address = "127.0.0.1" if self.bed is None else self.bed.address_of(node)
        store = "127.0.0.1" if self.bed is None else self.bed.address_of(STORE_HOST)
        command = [
            *(sys.executable, "-m", "remesh", "run", "--nnodes", f"1:{len(NODES)}", "--nproc-per-node", str(NUM_SLOTS)),
            *("--rdzv-endpoint", f"{store}:{self._port}", "--rdzv-id", "chaos", "--no-rdzv-host", "--node-name", node),
            *("--local-addr", address, "--events-dir", str(self._life / "events"), *FLAGS, *self._script),
        ]
        self.agents[node] = self._start(node, command, node)

    def is_up(self, node: str) -> bool:
        return node in self.agents and self.agents[node].poll() is None

    def can_be_joined(self) -> bool:
        """Whether a node that comes finds the job: its first store runs, or a node that has met the others."""
        if self._store is not None:
            return True
        met = {event["who"] for event in self.lives[-1] if event["kind"] == "generation"}
        indices = {event["pid"]: event["index"] for event in self.lives[-1] if event["kind"] == "agent"}
        return any(f"agent-{indices.get(self.agents[node].pid)}" in met for node in self.agents if self.is_up(node))

    def poll(self) -> list[Event]:
        """New events of the present life."""
        if not self.lives:
            return []
        new = self._readers[-1].poll()
        self.lives[-1] += new
        return new

    def describe_logs(self, num_lines: int = 40) -> str:
        ends = []
        for path in sorted(self._life.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            ends.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(ends)

    # --- faults ---

    def kill_node(self, node: str) -> None:
        if self.is_up(node):
            # Workers stopped before an agent was killed would otherwise outlive it.
            for pid in (self.agents[node].pid, *self.worker_pids(node)):
                _signal(pid, signal.SIGKILL)
            self.agents[node].wait()

    def kill_store(self) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.communicate(timeout=60)
            self._store = None

    def signal_worker(self, node: str, slot: int, number: int) -> None:
        pids = self.worker_pids(node)
        if slot < len(pids):
            _signal(pids[slot], number)

    def freeze_node(self, node: str, length_s: float) -> None:
        pids = [self.agents[node].pid, *self.worker_pids(node)]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        self._later(length_s, lambda: [_signal(pid, signal.SIGCONT) for pid in pids])

    def stall_worker(self, node: str, slot: int, length_s: float) -> None:
        pids = self.worker_pids(node)
        if slot < len(pids):
            _signal(pids[slot], signal.SIGSTOP)
            self._later(length_s, lambda: _signal(pids[slot], signal.SIGCONT))

    def cut_node(self, node: str, length_s: float) -> None:
        bed = self.bed
        assert bed is not None
        bed.cut(node)
        self._later(length_s, lambda: bed.mend(node))

    def slow_link(self, node: str, length_s: float) -> None:
        bed = self.bed
        assert bed is not None
        bed.set_rate(node, 50_000.0)
        self._later(length_s, lambda: bed.set_rate(node, None))

    def fill_disk(self) -> None:
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb") as file:
            while file.write(b"x" * 4096):
                file.flush()

    def free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    def prune_checkpoints(self, keep: int) -> None:
        """The disk is small: only the newest few stay."""
        saved = sorted((self.disk / "checkpoints").glob("*"), key=lambda path: path.stat().st_mtime)
        for path in saved[:-keep]:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def has_disk(self) -> bool:
        """Whether the job's disk is one that can be filled."""
        return self._has_disk

    def worker_pids(self, node: str) -> list[int]:
        """Processes of a node's workers, by slot, as far as they were started."""
        self.poll()
        agents = [event for event in self.lives[-1] if event["kind"] == "agent" and event["node"] == node]
        if not agents or agents[-1]["pid"] != self.agents[node].pid:
            return []
        who = f"agent-{agents[-1]['index']}"
        pids: dict[int, int] = {}
        for event in self.lives[-1]:
            if event["who"] == who and event["kind"] == "worker-started":
                pids[event["slot"]] = event["pid"]
            elif event["who"] == who and event["kind"] == "worker-exited":
                pids.pop(event["slot"], None)
        return [pids[slot] for slot in sorted(pids)]

    # --- what is left ---

    def processes(self) -> list[int]:
        """All processes that carry the mark of this job."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def shared_memory(self, pids: set[int]) -> list[str]:
        """Files in shared memory whose names tell that one of these processes made them."""
        return [
            path.name
            for path in Path("/dev/shm").glob("*")
            if (path.name.startswith("remesh") and not path.name.startswith(MPI_ROOMS))
            or any(str(pid) in path.name.split("_") for pid in pids)
        ]

    @property
    def _life(self) -> Path:
        return self.folder / f"life-{len(self.lives) - 1}"

    def _later(self, after_s: float, act: Any) -> None:
        timer = threading.Timer(after_s, act)
        timer.daemon = True
        self.timers = [each for each in self.timers if each.is_alive()] + [timer]
        timer.start()

    def _start(self, host: str, command: list[str], name: str, *, piped: bool = False) -> subprocess.Popen[bytes]:
        environment: Mapping[str, str] = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        if self.bed is not None:
            # What enters a host keeps its process id.
            command = [*self._inside(host), *command]
        with (self._life / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _inside(self, host: str) -> Iterator[str]:
        assert self.bed is not None
        entry = self.bed.entry_of(host)
        yield from (sys.executable, "-m", "remesh.testbed.enter", entry.namespace, entry.host, entry.hosts_file)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
