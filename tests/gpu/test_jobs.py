"""Elastic jobs whose workers each have a device: hurt for real, they go on over NCCL and lose no sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.testbed.local_job import LocalJob
from remesh.testbed.samples import SampleCount, count_samples
from tests.gpu.settings import CPU, TWO, Setting, in_settings, skip_without
from tests.procs.scripts import tiny
from tests.support.hold import Hold

pytestmark = pytest.mark.slow  # on the CPU tests/procs/elasticity/test_elastic.py has the same
QUIET_S = 120.0


def script(*flags: str, steps: int) -> list[str]:
    return [str(Path(tiny.__file__)), "--mesh", "dp=-1", "--steps", str(steps), *flags]


def count(job: LocalJob) -> SampleCount:
    return count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)


@in_settings(CPU, TWO)
def test_a_killed_worker_is_replaced_and_no_sample_is_lost(tmp_path: Path, setting: Setting) -> None:
    skip_without(setting.num_gpus)
    hold = Hold(tmp_path, 6)
    with LocalJob(tmp_path, script("--full-size", "2", *hold.flags, steps=40), nnodes="1") as job:
        job.start_node("a")
        hold.wait(job, 2, QUIET_S)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert count(job) == SampleCount(lost=0, repeated=0, total=40 * tiny.BATCH_SIZE)


@in_settings(CPU, TWO)
def test_a_rank_that_hangs_in_front_of_a_collective_is_replaced(tmp_path: Path, setting: Setting) -> None:
    skip_without(setting.num_gpus)
    with LocalJob(tmp_path, script("--mishap", "stuck", "--timeout-s", "600", steps=12), nnodes="1") as job:
        job.start_node("a", "--hang-timeout", "6")
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert job.of_kind("hang", generation=1)
        assert count(job).lost == count(job).repeated == 0
