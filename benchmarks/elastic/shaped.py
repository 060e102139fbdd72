"""Time of the state move in a recovery over its bound: hosts with shaped links, one dies and comes back.

One worker on each of four hosts, a state sharded over them, snapshots in neighbours' memory. A host is killed: three
share the state anew, from their own memory and the snapshots. It comes back: four share it again. The value is the time
of the move over that of a plain send and receive of the plan's bound of bytes, between two of the hosts, in the same
run: nothing can beat 1. What lies around the move (metadata, the plan, groups) stands beside it in seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Row, at_most, spread_of
from remesh.elasticity.telemetry.events import EventReader
from remesh.testbed import BedSpec, Testbed

NODES, STORE, RATE, PORT = ("a", "b", "c", "d"), "store", "100mbit", 29500
GOAL = 1.1
TIMEOUT_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
_STORE_PROGRAM = """
import sys, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""
Event = dict[str, Any]


def rows(*, quick: bool) -> list[Row]:
    """A host lost, and a host that joins."""
    state_mib = 16 if quick else 48
    spec = ",".join([*(f"{node}={RATE}" for node in NODES), f"{STORE}=full"])
    with Testbed(BedSpec.parse(spec)) as bed, tempfile.TemporaryDirectory() as folder:
        with _store(bed), _Job(bed, Path(folder), state_mib) as job:
            lost, joined = job.lose_and_regain("d")
        found: list[Row] = []
        for about, fills in (("a host of four lost", lost), ("a host joins three", joined)):
            found += _rows_of(bed, f"{state_mib} MiB over links of {RATE}, {about}", fills)
    return found


def _rows_of(bed: Testbed, about: str, fills: list[Event]) -> list[Row]:
    bound_bytes = fills[0]["bound_bytes"]
    if not bound_bytes:
        # Snapshots may lie with just those who want them, by the places that the nodes happened to get.
        return [Row(f"{about}: bytes of the bound", 0, "bytes")]
    plain_s = [max(bed.run(pass_bytes, {"a": 1, "b": 1}, (bound_bytes,))) for _ in range(3)]
    move_s = max(fill["move_seconds"] for fill in fills)
    fill_s = max(fill["seconds"] for fill in fills)
    spread = spread_of(plain_s)
    bound_s = statistics.median(plain_s)
    return [
        at_most(f"{about}: state moved over its bound", move_s / bound_s, "x bound", GOAL, bound=1.0, spread=spread),
        Row(f"{about}: bytes of the bound", bound_bytes, "bytes"),
        Row(f"{about}: time to fill", fill_s, "s", bound=bound_s),
    ]


def pass_bytes(num_bytes: int) -> float:
    """Seconds until the bytes are at the other rank."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    started_s = time.monotonic()
    if dist.get_rank() == 0:
        dist.send(buffer, 1)
    else:
        dist.recv(buffer, 0)
    return time.monotonic() - started_s


class _Job:
    """One agent with one worker on each host; a context manager."""

    def __init__(self, bed: Testbed, folder: Path, state_mib: int) -> None:
        self._bed = bed
        self._folder = folder
        self._state_mib = state_mib
        self._reader = EventReader(folder / "events")
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._events: list[Event] = []

    def __enter__(self) -> _Job:
        (self._folder / "events").mkdir()
        for node in NODES:
            self._start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._agents:
            self._kill(node)

    def lose_and_regain(self, node: str) -> tuple[list[Event], list[Event]]:
        """What the ranks told of both fills."""
        # So long that every rank has a snapshot of what it holds at its neighbour, over the slow link.
        self._wait_for_steps(len(NODES), lambda event: event["step"] >= 12 and self._num_kept() >= len(NODES))
        self._kill(node)
        lost = self._fills_of(self._wait_for_steps(len(NODES) - 1, lambda _: True))
        self._start(node)
        return lost, self._fills_of(
            self._wait_for_steps(len(NODES), lambda event: event["generation"] > lost[0]["generation"])
        )

    def _num_kept(self) -> int:
        return len({event["who"] for event in self._events if event["kind"] == "snapshot-kept"})

    def _fills_of(self, step: Event) -> list[Event]:
        return [e for e in self._events if e["kind"] == "filled" and e["generation"] == step["generation"]]

    def _wait_for_steps(self, world_size: int, is_it: Callable[[Event], bool]) -> Event:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            new = self._reader.poll()
            self._events += new
            for event in new:
                if event["kind"] == "step" and event["world_size"] == world_size and is_it(event):
                    return event
            time.sleep(0.02)
        logs = "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))
        raise TimeoutError(f"no step of {world_size} ranks within {TIMEOUT_S:g} s\n{logs}")

    def _start(self, node: str) -> None:
        bed = self._bed
        command = [
            *(sys.executable, "-m", "remesh", "run", "--nnodes", f"3:{len(NODES)}", "--nproc-per-node", "1"),
            *("--rdzv-endpoint", f"{bed.address_of(STORE)}:{PORT}", "--rdzv-id", "shaped", "--no-rdzv-host"),
            *("--node-name", node, "--local-addr", bed.address_of(node), "--last-call", "60", "--max-restarts", "0"),
            *("--events-dir", str(self._folder / "events"), "-m", "benchmarks.elastic.shaped_script"),
            *("--state-mib", str(self._state_mib)),
        ]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with (self._folder / f"{node}.log").open("ab") as log:
            self._agents[node] = bed.start_program(node, command, env={"PYTHONPATH": paths}, output=log)

    def _kill(self, node: str) -> None:
        """The host dies with all on it: its agent, and its worker, which would else end a moment later by itself."""
        agent = self._agents[node]
        pids = {event["index"]: event["pid"] for event in self._events if event["kind"] == "agent"}
        mine = [f"agent-{index}" for index, pid in pids.items() if pid == agent.pid]
        workers = [e["pid"] for e in self._events if e["kind"] == "worker-started" and e["who"] in mine]
        for pid in (agent.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


@contextlib.contextmanager
def _store(bed: Testbed) -> Iterator[None]:
    """A store on a host of its own, which outlives the nodes."""
    entry = bed.entry_of(STORE)
    enter = ("-m", "remesh.testbed.enter", entry.namespace, entry.host, entry.hosts_file, sys.executable)
    program = subprocess.Popen(
        [sys.executable, *enter, "-c", _STORE_PROGRAM, str(PORT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert program.stdout is not None and program.stdout.readline(), "the store did not start"
        yield
    finally:
        program.kill()
        program.communicate()
