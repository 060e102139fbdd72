"""The main job: train, lose a node, go on, grow again, save, and start again in two other layouts. ``make demo``.

Two agents with two workers each run on loopback. Every promise is checked against the event logs at the end; the exit
code is 1 if one fails.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import train
import view
from story import Change, Story, compare_losses

from remesh.testbed.local_job import Event, LocalJob
from remesh.testbed.samples import count_samples

HERE = Path(__file__).parent
NODES = ("node-a", "node-b")
KILL_AT, RETURN_AT, MAIN_STEPS, TP_STEPS, DP_STEPS = 40, 45, 180, 200, 220
QUIET_S = 60.0
"""How long a job may get nowhere; it may take as long as the machine needs."""
HURT_STEP_S = 0.15
"""Steps of the job that is hurt take at least so long: time for a node to start again before the last one."""
LOSS_TOLERANCE = 1e-9
LOSS_TOLERANCE_REASON = (
    "training runs in float64, where another order of summation changes a loss by some 2e-15 over the whole run, "
    "while a single sample lost or repeated changes it by 5e-2 at once and by more than 5e-4 later (both measured)"
)


class DemoFailed(Exception):
    """A job did not do what it had to; the message is for people."""


class Demo:
    """The whole story, job by job."""

    def __init__(self, folder: Path, screen: view.Screen) -> None:
        self.folder = folder
        self.screen = screen
        self.killed_s = 0.0

    def run(self) -> dict[str, Any]:
        begun_s = time.monotonic()
        checkpoint = self.folder / "checkpoints"
        main = self._run_job("main", "dp=-1,tp=2", MAIN_STEPS, checkpoint, self._hurt)
        by_tp = self._run_job("again-tp", "tp=4", TP_STEPS, checkpoint)
        by_dp = self._run_job("again-dp", "dp=4", DP_STEPS, checkpoint)
        reference = self._run_job("reference", "dp=2,tp=2", DP_STEPS, self.folder / "reference-checkpoints")
        summary = summarise(main, [by_tp, by_dp], reference, self.killed_s)
        summary["seconds"] = time.monotonic() - begun_s
        return summary

    def _run_job(
        self, name: str, mesh: str, steps: int, checkpoint: Path, extra: Callable[[LocalJob, Event], None] | None = None
    ) -> Story:
        self.screen.begin(name, mesh, steps)
        script = [str(HERE / "train.py"), "--mesh", mesh, "--steps", str(steps), "--checkpoint", str(checkpoint)]
        if extra is not None:
            script += ["--step-s", str(HURT_STEP_S)]
        with LocalJob(self.folder / name, script) as job:
            for node in NODES:
                job.start_node(node)
            for event in job.follow(QUIET_S):
                self.screen.show(event)
                if extra is not None:
                    extra(job, event)
            failed = {node: agent.returncode for node, agent in job.agents.items() if agent.returncode != 0}
            if failed:
                raise DemoFailed(f"job {name!r}: agents ended with {failed}\n{job.describe_logs()}")
            return Story(name, job.events)

    def _hurt(self, job: LocalJob, event: Event) -> None:
        """Kill node-b at one step, and let it come back some steps later."""
        if event["kind"] != "step":
            return
        if not self.killed_s and event["step"] >= KILL_AT:
            self.killed_s = job.kill_node(NODES[1])
            self.screen.say(f"SIGKILL to {NODES[1]}: its agent and both workers, at step {event['step']}")
        elif event["generation"] == 2 and event["step"] >= RETURN_AT and job.agents[NODES[1]].poll() is not None:
            job.start_node(NODES[1])
            self.screen.say(f"{NODES[1]} starts again and will ask to join")


def summarise(main: Story, again: list[Story], reference: Story, killed_s: float) -> dict[str, Any]:
    """All figures that the demo promises, from the event logs."""
    jobs = [main, *again]
    samples = count_samples(
        [job.events for job in jobs], num_samples=train.NUM_SAMPLES, batch_size=train.BATCH_SIZE, seed=train.SEED
    )
    recovery = main.change_to(2, killed_s)
    if len(main.generations) < 3:
        raise DemoFailed(
            f"{NODES[1]} took so long to start again that the job was done before it could join; free the machine of "
            "other work and run the demo again"
        )
    growth = main.change_to(3, main.of_kind("left", generation=2)[0]["t"])
    restarts = [job.change_to(1, job.generations[0]["t"]) for job in again]
    return {
        "steps": max(again[-1].losses),
        "samples": samples.total,
        "samples_lost": samples.lost,
        "samples_repeated": samples.repeated,
        "recovery_s": {**{phase.name: phase.seconds for phase in recovery.phases}, "total": recovery.seconds},
        "growth_s": {**{phase.name: phase.seconds for phase in growth.phases}, "total": growth.seconds},
        "bytes_from_peers": recovery.bytes_from_peers + growth.bytes_from_peers,
        "bytes_from_disk": recovery.bytes_from_disk + growth.bytes_from_disk,
        "bytes_from_disk_on_restart": {
            job.name: change.bytes_from_disk for job, change in zip(again, restarts, strict=True)
        },
        "survivor_pids_before": main.pids_on(NODES[0], 1),
        "survivor_pids_after": main.pids_on(NODES[0], 3),
        "meshes": [plan["axes"] for job in jobs for plan in job.generations],
        "members": [_members_of(plan) for job in jobs for plan in job.generations],
        "max_loss_difference": compare_losses(jobs, reference),
        "loss_tolerance": LOSS_TOLERANCE,
        "loss_tolerance_reason": LOSS_TOLERANCE_REASON,
        "machine": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "steps_per_s": main.steps_per_s(3),
        "changes": [
            _change_row(recovery, f"{NODES[1]} killed"),
            _change_row(growth, f"{NODES[1]} came back"),
            *(_change_row(change, f"loaded as {report.format_axes(change.axes)}") for change in restarts),
        ],
        "losses": {
            "job": [[s, loss] for job in jobs for s, loss in sorted(job.losses.items())],
            "reference": sorted(reference.losses.items()),
        },
    }


def _members_of(plan: Event) -> list[dict[str, Any]]:
    """Node and process of each rank."""
    return [{"node": plan["hosts"][str(one["node"])], "pid": one["pid"]} for one in plan["members"]]


def _change_row(change: Change, what: str) -> dict[str, Any]:
    return {
        "what": what,
        "to": change.axes,
        "step": change.step,
        "reason": change.reason,
        "phases": {phase.name: phase.seconds for phase in change.phases},
        "moved": [[giver, taker, count] for (giver, taker), count in sorted(change.bytes_by_node.items())],
        "bytes_kept": change.bytes_kept,
        "bytes_from_disk": change.bytes_from_disk,
    }


def check_promises(summary: dict[str, Any]) -> dict[str, bool]:
    """Each promise of the demo, and whether it was kept."""
    shapes = [tuple(axes.items()) for axes in summary["meshes"]]
    expected = [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4}]
    return {
        "no sample lost": summary["samples_lost"] == 0,
        "no sample repeated": summary["samples_repeated"] == 0,
        "survivors kept their processes": summary["survivor_pids_before"] == summary["survivor_pids_after"],
        "recovered from memory, not from disk": summary["bytes_from_disk"] == 0,
        "the newcomer was filled by its peers": summary["bytes_from_peers"] > 0,
        "the meshes are the ones asked for": shapes == [tuple(axes.items()) for axes in expected],
        "loss curve as if nothing had happened": summary["max_loss_difference"] <= summary["loss_tolerance"],
    }


def prepare(folder: Path) -> None:
    """An empty folder. What an earlier demo left there is removed; anything else is not ours to remove."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "demo-folder").exists():
            raise DemoFailed(f"{folder} is not empty and was not made by this demo; name another folder with --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo-folder").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    options = parser.parse_args()
    try:
        prepare(options.folder)
        with view.Screen() as screen:
            summary = Demo(options.folder, screen).run()
    except (DemoFailed, TimeoutError) as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo stopped; nothing of it runs on", file=sys.stderr)
        return 128 + signal.SIGINT
    promises = check_promises(summary)
    summary["promises"] = promises
    curves = summary.pop("losses")
    (options.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (options.folder / "report.html").write_text(report.render(summary, curves))
    (options.folder / "loss.svg").write_text(report.render_picture(curves, summary["changes"]))
    view.print_summary(summary, options.folder)
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
