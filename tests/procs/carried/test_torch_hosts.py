"""A job on several hosts that are all this one: addresses of the loopback, each with a process that keeps its ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs.carried.torch_jobs import NEEDS_IMAGES, REMESH, TorchJob, run_natively

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), NEEDS_IMAGES]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()


def _hosts_now(job: TorchJob) -> list[str]:
    shown = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    return [each["host"] for each in json.loads(shown.stdout)["now"]["ranks"]]


@pytest.mark.slow
def test_a_job_goes_on_on_other_hosts_to_the_same_bits(job: TorchJob, tmp_path: Path) -> None:
    steps, go = "200", tmp_path / "go"
    hosts = ("--nnodes", "2", "--nproc-per-node", "1", "--hosts", "127.0.0.2,127.0.0.3")
    job.run("steady.py", steps, str(go), options=hosts)
    job.wait_for(3)
    assert _hosts_now(job) == ["127.0.0.2", "127.0.0.3"]
    job.stop()
    refused = subprocess.run(
        [*REMESH, "restart", str(job.folder), "--hosts", "127.0.0.4:2,127.0.0.5:1"], capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "room for 3, expected exactly 2 ranks" in refused.stderr
    job.restart("--hosts", "127.0.0.4:2")
    go.touch()
    assert job.finish() == run_natively("steady.py", 2, steps, str(go))
