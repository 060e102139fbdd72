"""Random jobs that add up gradients over commits, hurt at random: every commit is as in one process that nothing hurts.

A seed draws how many commits make a step of the optimizer, or of each of two, how the model is held and kept, and what
happens: a worker or a node is killed, a node is taken away, one joins, each so many commits after the job has settled.
The oracle is plain torch; the checksum of the weights is compared after every commit, on every mesh.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from remesh.elasticity.telemetry.events import EventReader
from remesh.foundation.exit_codes import ExitCode
from remesh.testbed.samples import count_samples
from tests.procs.elasticity.test_accumulation import SCRIPT, checksums_of_one_process
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import tiny

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(900)]
QUIET_S = 120.0
MANY_STEPS = 100_000
"""More than any machine makes: the story ends, and then the job."""
_NUM_FAULTS, _MOST_NODES = 4, 3
_KEPT: list[tuple[str, ...]] = [(), ("--attempt",), ("--snapshot-every", "1"), ("--fsdp", "--snapshot-every", "1")]


@dataclass
class Story:
    """A job and who is in it."""

    job: ForkedJob
    chance: random.Random
    is_cut: bool
    """Whether no rank has the whole state, so that who is hurt must have left a snapshot with another one."""
    present: list[str]
    num_started: int = 0

    def start(self) -> None:
        node = f"n{self.num_started}"
        self.num_started += 1
        self.job.start_node(node, "--max-restarts", "100")
        self.present.append(node)

    def hurt(self, num_commits: int) -> str:
        """Once all who are there have made so many commits together, something that leaves the state with others."""
        commits: dict[int, set[int]] = {}
        keeping: dict[int, set[str]] = {}  # by step, whose snapshots of it are kept, since the last generation began
        num_to_keep = len(self.present) if self.is_cut and len(self.present) > 1 else 0
        for event in self.job.follow(QUIET_S):
            if event["kind"] == "generation" and event["axes"]["dp"] == len(self.present):
                if event["number"] not in commits:
                    commits[event["number"]], keeping = set(), {}
            elif event["kind"] == "step" and event["generation"] in commits:
                commits[event["generation"]].add(event["step"])
            elif event["kind"] == "snapshot-kept":
                keeping.setdefault(event["step"], set()).add(event["who"])
            is_kept = num_to_keep == 0 or any(len(who) >= num_to_keep for who in keeping.values())
            if is_kept and any(len(steps) >= num_commits for steps in commits.values()):
                break
        else:
            raise AssertionError(f"the job ended before its story\n{self.job.describe_logs()}")
        hurting = ["worker killed", "node killed", "node preempted"] if len(self.present) > 1 else []
        act = self.chance.choice([*hurting, *(["node started"] if len(self.present) < _MOST_NODES else [])])
        node = self.chance.choice(self.present)
        if act in ("node killed", "node preempted"):
            self.present.remove(node)
        match act:
            case "worker killed":
                self.job.kill_worker(node, 0)
            case "node killed":
                self.job.kill_node(node)
            case "node preempted":
                self.job.preempt_node(node, QUIET_S)
                assert self.job.agents[node].wait(QUIET_S) in (ExitCode.LEFT, ExitCode.LEFT_WITHOUT_STATE)
            case "node started":
                self.start()
        return act


@pytest.mark.parametrize("seed", range(8))
def test_a_job_that_accumulates_and_is_hurt_at_random_is_as_in_one_process(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    every, kept = chance.randint(2, 7), _KEPT[seed % len(_KEPT)]
    other = chance.choice([None, chance.randint(1, 7)])
    flags = ["--mesh", "dp=-1", "--steps", str(MANY_STEPS), "--accumulate", str(every), "--pause-s", "0.1", *kept]
    flags += [] if other is None else ["--accumulate-other", str(other)]
    done: list[str] = []
    with ForkedJob(tmp_path, [SCRIPT, *flags], nnodes=f"1:{_MOST_NODES}", workers_per_node=1) as job:
        story = Story(job, chance, "--fsdp" in kept, [])
        story.start()
        story.start()
        for _ in range(_NUM_FAULTS):
            done.append(story.hurt(chance.randint(1, 2 * every)))
        story.hurt(every)
    events = EventReader(tmp_path / "events").poll()
    count = count_samples([events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
    assert count.lost == 0, done
    # Who goes back to a snapshot makes some commits again, with what was added up at that time.
    assert count.repeated == 0 or "--fsdp" in kept, done
    steps = [event for event in events if event["kind"] == "step"]
    right = checksums_of_one_process(every, max(event["step"] for event in steps), other)
    for event in steps:
        about = (done, kept, every, other, event["step"], event["generation"])
        assert event["checksum"] == pytest.approx(right[event["step"]], rel=1e-9), about
    assert {event["step"] for event in steps} == right.keys(), done
