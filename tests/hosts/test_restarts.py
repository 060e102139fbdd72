"""Scripts of hosts whose workers die in the middle: the launcher starts them again, and they go on to their end.

A worker kills itself behind its fifth step, in the first attempt alone; steps since the last checkpoint are done again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from remesh.wire.free_ports import free_port
from tests.hosts.jobs import wait_patiently

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "integrations"
_RUN = ("remesh.run", "--mode", "restart", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
_LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "2")
"""Its only launcher of several processes, which starts them without a GPU, too."""
_LAUNCH_MORE = ("--max_restarts", "1", "--mixed_precision", "no", "--dynamo_backend", "no")


def _start(arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", *arguments], env=environment, stdout=file, stderr=file)


def _check(jobs: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> None:
    """See that all end well, and that steps since the last checkpoint were done again, and no others."""
    try:
        wait_patiently(jobs)
    finally:
        for job in jobs:
            job.kill()
    codes = [job.wait() for job in jobs]
    text = "".join(output.read_text(errors="replace") for output in outputs)
    assert codes == [0] * len(jobs), text
    steps = [int(line.split("step ")[1].split()[0]) for line in text.splitlines() if line.startswith("step ")]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8], text


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "script", ["accelerate_checkpointing.py", "lightning_model_parallel.py", "transformers_trainer.py"]
)
def test_a_job_under_our_launcher_goes_on_when_a_worker_dies(tmp_path: Path, script: str) -> None:
    output = tmp_path / "said"
    _check([_start((*_RUN, str(_EXAMPLES / script), str(tmp_path / "run")), output)], [output])


@pytest.mark.timeout(1800)
def test_two_machines_of_accelerate_launch_go_on_over_our_rendezvous_when_a_worker_dies(tmp_path: Path) -> None:
    place = ("--rdzv_backend", "remesh", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()))
    script = (str(_EXAMPLES / "accelerate_checkpointing.py"), str(tmp_path / "run"))
    outputs = [tmp_path / f"said-{machine}" for machine in range(2)]
    jobs = [
        _start((*_LAUNCH, "--machine_rank", str(machine), *place, *_LAUNCH_MORE, *script), output)
        for machine, output in enumerate(outputs)
    ]
    _check(jobs, outputs)
