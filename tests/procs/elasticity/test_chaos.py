"""The soak. ``REMESH_CHAOS_FAULTS`` sets the number of faults over all jobs, ``REMESH_CHAOS_SEED`` the first seed."""

import os
from pathlib import Path

import pytest

from tests.procs.chaos.soak import soak
from tests.procs.scripts import layouts

JOBS_PER_LAYOUT = 3
NUM_FAULTS = int(os.environ.get("REMESH_CHAOS_FAULTS", "504"))
FIRST_SEED = int(os.environ.get("REMESH_CHAOS_SEED", "1"))
PER_JOB = -(-NUM_FAULTS // (JOBS_PER_LAYOUT * len(layouts.MESHES)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + JOBS_PER_LAYOUT))
@pytest.mark.parametrize("layout", sorted(layouts.MESHES))
def test_a_job_that_is_hurt_at_random_comes_out_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, seed: int
) -> None:
    """A story of faults; again by itself with ``python -m tests.procs.chaos.soak --layout ... --seed ...``."""
    with capsys.disabled():
        print()
        report = soak(tmp_path, layout, seed, PER_JOB)
    assert not report.wrong, "\n".join([report.describe(), *report.wrong[:20]])
