"""The benchmark of devices on two hosts of a testbed, each with a launcher of its own: it says where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import ROWS
from benchmarks.report import OUT
from remesh.testbed import BedSpec, Testbed

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

HOSTS = ("a", "b")


def test_every_row_is_measured_over_two_hosts(tmp_path: Path) -> None:
    with Testbed(BedSpec.parse(",".join(f"{host}=full" for host in HOSTS))) as bed:
        common = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--master-addr", bed.address_of("a"), "--master-port", "29500"),
        ]
        logs = {host: (tmp_path / f"{host}.log").open("w+b") for host in HOSTS}
        running = {
            host: bed.start_program(
                host,
                [
                    *(*common, "--node-rank", str(number), "-m", "benchmarks.gpu"),
                    *("--device", "cpu", "--folder", str(tmp_path)),
                ],
                env={"OMP_NUM_THREADS": "1"},
                output=logs[host],
            )
            for number, host in enumerate(HOSTS)
        }
        try:
            ended = [each.wait(500) for each in running.values()]
        except subprocess.TimeoutExpired:
            ended = [None]
        finally:
            for each in running.values():
                each.kill()
                each.wait()
            for log in logs.values():
                log.close()
    told = {host: (tmp_path / f"{host}.log").read_text() for host in HOSTS}
    assert ended == [0, 0], told
    assert all(case in told["a"] for case in ROWS) and "not run" not in told["a"], told["a"]
    report = json.loads((OUT / "gpu-cpu.json").read_text())
    assert (report["devices"], report["world_size"], report["num_hosts"]) == (["CPU"], 2, 2)
