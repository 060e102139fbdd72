"""Second attempts of a plain script that loses a rank: restart mode beside torchrun, wherever nodes meet.

The script (:mod:`benchmarks.elastic.meets_script`) makes a gloo group and adds numbers up; in its first attempt rank 1
is killed. Both launchers run it with the same flags, in turn, with three restarts to use up: two workers on one node
(``standalone``), or one on each of two. A job in which no rank gets anywhere for 90 s did not come back; its output is
printed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic import meets_script
from benchmarks.elastic.etcd_server import etcd_server, why_no_etcd
from benchmarks.elastic.peers import FOLDER
from benchmarks.elastic.settings import Settings
from benchmarks.report import Row, at_least
from remesh.testbed.quiet_limit import QuietLimit
from remesh.wire.free_ports import free_port

MEETINGS = ("standalone", "static", "c10d", "etcd")
LAUNCHERS = {"remesh": ("remesh.run", "--mode", "restart"), "torchrun": ("torch.distributed.run",)}
MAX_RESTARTS = 3
QUIET_S = 90.0
NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """One job whose rank 1 was killed in its first attempt."""

    returncodes: tuple[int | None, ...]
    """Of the launchers; None for one that was given up."""
    num_attempts: int
    """Attempts that some rank began after the kill."""
    seconds: float | None
    """From the kill until all ranks had come through; None if they never did."""
    output: str

    @property
    def came_back(self) -> bool:
        return self.seconds is not None and set(self.returncodes) == {0}

    @property
    def at_first(self) -> bool:
        """Whether no attempt was wasted."""
        return self.came_back and self.num_attempts == 1


def kill_once(launcher: str, meeting: str, *flags: str) -> Trial:
    """Run the script under a launcher until it has ended."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        told = folder / "told"
        told.mkdir()
        port = free_port()
        if meeting == "etcd":
            # torch's own backend speaks version 2, which is off by default.
            port = stack.enter_context(etcd_server(folder, *(["--enable-v2"] if launcher == "torchrun" else [])))
        commands = [
            [sys.executable, "-m", *LAUNCHERS[launcher], *where, *flags, meets_script.__file__, str(told)]
            for where in _places(launcher, meeting, port)
        ]
        returncodes, output = _run_all(commands, folder, told)
        return tell_trial(told, returncodes, output)


def _places(launcher: str, meeting: str, port: int) -> Iterator[list[str]]:
    """Flags of each node that say where they meet."""
    restarts = ["--max-restarts", str(MAX_RESTARTS)]
    if meeting == "standalone":
        yield ["--standalone", "--nproc-per-node", str(NUM_RANKS), *restarts]
        return
    for node in range(NUM_RANKS):
        if meeting == "static":
            yield ["--nnodes", "2", "--node-rank", str(node), "--master-port", str(port), *restarts]
        else:
            backend = "etcd-v2" if (launcher, meeting) == ("torchrun", "etcd") else meeting
            conf = "join_timeout=30,last_call_timeout=1"
            where = ("--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf)
            yield ["--nnodes", "2", *where, "--rdzv-id", "job", "--local-addr", "127.0.0.1", *restarts]


def _run_all(commands: Sequence[Sequence[str]], folder: Path, told: Path) -> tuple[tuple[int | None, ...], str]:
    """How the commands ended, and what they said. They are given up when the script leaves no new file in ``told``."""
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(FOLDER))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    log = folder / "log"
    with log.open("ab") as stream:
        running = [
            subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
            for command in commands
        ]
    limit = QuietLimit(lambda: sorted(told.iterdir()), QUIET_S)
    while any(one.poll() is None for one in running) and not limit.is_over():
        time.sleep(0.02)
    returncodes = tuple(one.poll() for one in running)
    for one in running:
        # By SIGTERM a launcher takes its workers along.
        one.terminate()
        try:
            one.wait(timeout=40)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
    return returncodes, log.read_text(errors="replace")


def tell_trial(told: Path, returncodes: tuple[int | None, ...], output: str) -> Trial:
    """What came of it, by the files that the script left."""
    attempts = {int(path.name.split("-")[1]) for path in told.glob("[0-9]*")}
    through = list(told.glob("ok-*"))
    seconds = None
    if (killed := told / "killed").exists() and len(through) == NUM_RANKS:
        seconds = max(path.stat().st_mtime for path in through) - killed.stat().st_mtime
    return Trial(returncodes, max(attempts, default=0), seconds, output)


@dataclass
class Count:
    """The trials of one launcher on one meeting place."""

    launcher: str
    meeting: str
    trials: list[Trial] = field(default_factory=list)
    spent_s: float = 0.0

    def take_lock(self) -> None:
        begun_s = time.monotonic()
        trial = kill_once(self.launcher, self.meeting)
        self.trials.append(trial)
        self.spent_s += time.monotonic() - begun_s
        if self.launcher == "remesh" and not trial.at_first:
            print(f"{self.meeting}: not back at the first attempt, {trial.returncodes}\n{trial.output}", flush=True)

    def rows(self) -> list[Row]:
        about = f"restart mode, {self.meeting}: {self.launcher}"
        ours, total = self.launcher == "remesh", len(self.trials)
        first = sum(trial.at_first for trial in self.trials)
        never = sum(not trial.came_back for trial in self.trials)
        wasted = sum(max(0, trial.num_attempts - trial.came_back) for trial in self.trials)
        rows = [
            Row(f"{about}, kills", total, "kills"),
            at_least(f"{about}, back at the first attempt", first, "jobs", total if ours else None),
            Row(f"{about}, never back", never, "jobs"),
            Row(f"{about}, attempts wasted", wasted, "attempts"),
        ]
        if times := [trial.seconds for trial in self.trials if trial.came_back and trial.seconds is not None]:
            rows.append(Row(f"{about}, kill to through, p50", statistics.median(times), "s"))
        return rows


def rows_of(meeting: str, settings: Settings) -> Iterator[Sequence[Row]]:
    """Rows of a meeting place after each turn of both launchers, over the kills so far."""
    if meeting == "etcd" and (missing := why_no_etcd()):
        print(f"left out: restart mode on etcd, which {missing}")
        return
    counts = [Count("remesh", meeting)]
    if "torchrun" in settings.peers:
        if meeting == "etcd" and not (FOLDER / "etcd").is_dir():
            print(f"left out: torchrun on etcd, whose backend needs python-etcd in {FOLDER.name}/")
        else:
            counts.append(Count("torchrun", meeting))
    for _ in range(settings.num_kills):
        for count in counts:
            if count.launcher == "remesh" or count.spent_s < 60 * settings.peer_minutes:
                count.take_lock()
        yield [row for count in counts for row in count.rows()]
