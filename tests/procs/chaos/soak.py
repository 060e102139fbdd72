"""Hurts a job by a story, and looks whether it came out whole.

    python -m tests.procs.chaos.soak --layout tp --seed 3 --faults 50 [--first 17]

runs one story by itself, from the root of the repository.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.procs.chaos.evidence import find_faults, trace_line
from tests.procs.chaos.job import FULL_SIZE, NODES, NUM_SLOTS, HurtJob
from tests.procs.chaos.story import ENDS_LIFE, NETWORK, Fault, Kind, tell_story
from tests.procs.scripts import layouts

STEP_TIMEOUT_S = 150.0
"""How long a job may take to make its next step after a fault; frozen nodes and new processes are in it."""
FULL_TIMEOUT_S = 60.0
"""How long the next fault waits for all workers to be back; then it strikes whoever is there."""
END_TIMEOUT_S = 120.0
POLL_S = 0.02
TOLERANCE = 1e-7
"""Relative: layouts add up in different orders, in double precision, over some thousand steps."""
STREAM = {"num_samples": layouts.NUM_SAMPLES, "batch_size": layouts.BATCH_SIZE, "seed": layouts.SEED}
CHECKPOINTS_KEPT = 3
_EXPECTED_CODES = (0, -signal.SIGKILL, 75, 80, 81)
"""Of agents: ended well, killed by a fault, lost the others, or left."""


@dataclass
class Report:
    """What a soak saw."""

    layout: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    wrong: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_repeated: int = 0
    num_lives: int = 0
    num_generations: int = 0
    longest_s: float = 0.0
    """Longest time from a fault to the next step."""

    def describe(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return (
            f"{self.layout}, seed {self.seed}: {sum(self.counts.values())} faults ({faults}); longest wait for a step "
            f"{self.longest_s:.1f} s{self._describe_end()}"
        )

    def _describe_end(self) -> str:
        if not self.num_steps:
            return ""
        return (
            f"; {self.num_steps} steps, {self.num_repeated} gone back over, {self.num_generations} generations, "
            f"{self.num_lives} lives; {len(self.wrong)} wrong"
        )


class Broken(Exception):
    """The job did what no fault explains."""


class Soak:
    """One job and its story."""

    def __init__(self, job: HurtJob, report: Report) -> None:
        self.job = job
        self.report = report
        self._may_end = False
        self._asked: set[int] = set()
        """Agents that were asked to leave."""
        self._pids: set[int] = set()

    def run(self, story: Sequence[Fault]) -> None:
        self.job.start_life()
        for fault in story:
            self._wait_for_peace(fault)
            time.sleep(fault.delay_s)
            since_s = time.time()
            if not self._strike(fault):
                continue
            self.report.counts[fault.kind.value] += 1
            self._wait_for_step(fault, since_s)
            if fault.number % 10 == 9:
                print(f"{time.strftime('%H:%M:%S')} after fault {fault.number}: {self.report.describe()}", flush=True)
        self._end()

    def _wait_for_peace(self, fault: Fault) -> None:
        """Until some steps were made since, and all workers are back unless the fault comes early."""
        wanted_steps, deadline_s = fault.after_steps, time.monotonic() + FULL_TIMEOUT_S
        seen: set[int] = set()
        while time.monotonic() < deadline_s:
            for event in self._look():
                if event["kind"] == "step" and (fault.is_early or event["world_size"] == FULL_SIZE):
                    seen.add(event["step"])
            if len(seen) >= wanted_steps:
                return
            time.sleep(POLL_S)

    def _strike(self, fault: Fault) -> bool:
        """Do it; False when there is nobody to do it to."""
        job, node = self.job, NODES[fault.node]
        if fault.kind not in ENDS_LIFE and not job.is_up(node):
            return False
        match fault.kind:
            case Kind.WORKER_KILLED:
                job.signal_worker(node, fault.slot, signal.SIGKILL)
            case Kind.NODE_KILLED:
                job.kill_node(node)
            case Kind.WORKER_STALLED:
                job.stall_worker(node, fault.slot, fault.length_s)
            case Kind.WORKER_FROZEN:
                job.signal_worker(node, fault.slot, signal.SIGSTOP)
            case Kind.NODE_FROZEN:
                job.freeze_node(node, fault.length_s)
            case Kind.NODE_CUT:
                job.cut_node(node, fault.length_s)
            case Kind.LINK_SLOW:
                job.slow_link(node, fault.length_s)
            case Kind.STORE_KILLED:
                self._may_end = True
                job.kill_store()
            case Kind.NODE_PREEMPTED:
                self._asked.add(job.agents[node].pid)
                job.agents[node].terminate()
            case Kind.DISK_FULL:
                self._may_end = True
                job.fill_disk()
        return True

    def _wait_for_step(self, fault: Fault, since_s: float) -> None:
        """Until a step shows that the job goes on, on a new life if need be."""
        after_s = since_s + fault.length_s
        deadline_s = time.monotonic() + STEP_TIMEOUT_S + fault.length_s
        steps_wanted = 25 if fault.kind in ENDS_LIFE else 1  # so that a save meets the full disk
        steps: set[int] = set()
        while time.monotonic() < deadline_s:
            for event in self._look():
                if event["kind"] == "step" and event["t"] > after_s:
                    steps.add(event["step"])
            if len(steps) >= steps_wanted:
                self.report.longest_s = max(self.report.longest_s, time.time() - after_s)
                self._may_end = False
                self.job.free_disk()
                return
            time.sleep(POLL_S)
        raise Broken(
            f"no step within {STEP_TIMEOUT_S:g} s after fault {fault.number}, {fault.kind.value} of "
            f"{NODES[fault.node]}/{fault.slot}"
        )

    def _look(self) -> list[dict[str, object]]:
        """New events; nodes that are gone are started again, and so is the job when it may have ended."""
        job = self.job
        new = job.poll()
        if any(event["kind"] == "saved" for event in new):
            job.prune_checkpoints(CHECKPOINTS_KEPT)
        self._pids |= {int(event["pid"]) for event in new if event["kind"] in ("worker-started", "agent")}
        gone = [node for node in NODES if not job.is_up(node)]
        codes = {node: job.agents[node].poll() for node in gone}
        # A node that was asked to leave while it was starting has nobody yet who would listen.
        asked = {node for node in gone if job.agents[node].pid in self._asked and codes[node] == -signal.SIGTERM}
        failed = {node: code for node, code in codes.items() if node not in asked and code not in _EXPECTED_CODES}
        if failed and not self._may_end:
            raise Broken(f"agents ended with codes {failed}")
        if len(gone) == len(NODES) or (failed and self._may_end) or (gone and not job.can_be_joined()):
            # The last node may be killed, or asked to leave.
            is_expected = any(
                code == -signal.SIGKILL or job.agents[node].pid in self._asked for node, code in codes.items()
            )
            if not self._may_end and not is_expected:
                raise Broken(f"all agents ended, with codes {codes}")
            job.end_life()
            job.free_disk()
            job.start_life()
        elif gone and not self._may_end:
            for node in gone:
                job.start_node(node)
        return new

    def _end(self) -> None:
        """Let it come to its end, and look at everything."""
        job, report = self.job, self.report
        for timer in job.timers:
            timer.join()
        self._wait_for_peace(Fault(-1, Kind.WORKER_KILLED, 0, 0, 3, 0.0, 0.0, False))
        job.stop_file.touch()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while any(job.is_up(node) for node in NODES) and time.monotonic() < deadline_s:
            self._pids |= {int(event["pid"]) for event in job.poll() if event["kind"] in ("worker-started", "agent")}
            time.sleep(POLL_S)
        codes = {node: job.agents[node].poll() for node in NODES}
        if set(codes.values()) != {0}:
            report.wrong.append(f"the job did not end well: exit codes {codes}")
        job.poll()
        job.kill_store()
        self._judge()

    def _judge(self) -> None:
        job, report = self.job, self.report
        # The kernel needs a moment to take processes away.
        deadline_s = time.monotonic() + 10
        while (left := job.processes()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if left:
            report.wrong.append(f"processes {left} are left")
        if files := job.shared_memory(self._pids):
            report.wrong.append(f"files in shared memory are left: {files}")
        line = trace_line(job.lives)
        report.num_steps, report.num_repeated = max(line.steps, default=0), line.num_repeated
        report.num_lives = len(job.lives)
        report.num_generations = sum(
            len({event["number"] for event in life if event["kind"] == "generation"}) for life in job.lives
        )
        reference = layouts.reference_losses(report.num_steps)
        report.wrong += find_faults(line, reference, tolerance=TOLERANCE, stream=STREAM)


def soak(folder: Path, layout: str, seed: int, num_faults: int, first: int = 0) -> Report:
    """Run a story; the report says what was wrong. `Broken` carries the ends of the logs."""
    report = Report(layout, seed)
    script = [str(Path(layouts.__file__)), "--layout", layout]
    with HurtJob(folder, script) as job:
        kinds = frozenset(Kind)
        if job.bed is None:
            kinds -= NETWORK
        if not job.has_disk:
            kinds -= {Kind.DISK_FULL}
        if missing := frozenset(Kind) - kinds:
            print(f"left out, for this machine does not let us: {', '.join(each.value for each in missing)}")
        story = tell_story(seed, num_faults, num_nodes=len(NODES), num_slots=NUM_SLOTS, kinds=kinds)
        try:
            Soak(job, report).run(story[first:])
        except Broken as error:
            raise Broken(f"{report.describe()}: {error}\n{job.describe_logs()}") from error
    print(report.describe(), flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=layouts.MESHES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="begin with this fault of the story")
    parser.add_argument("--folder", type=Path, help="keep the logs here; default: a folder that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remesh-chaos-") as temporary:
        folder = options.folder or Path(temporary)
        report = soak(folder, options.layout, options.seed, options.faults, options.first)
    for line in report.wrong[:20]:
        print(line)
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
