"""``torchrun --rdzv-backend remesh``, as torch finds it: by an entry point."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from remesh.foundation.linux.procfs import children_of
from remesh.wire.free_ports import free_port
from tests.procs.agents import TIMEOUT_S, PlainAgents, meeting_flags

pytestmark = pytest.mark.procs


def _with_entry_point(folder: Path) -> dict[str, str]:
    """Variables of a process that finds our entry point, whatever is installed where the tests run."""
    found = folder / "site" / "a_remesh_handler-1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: a-remesh-handler\nVersion: 1\n")
    (found / "entry_points.txt").write_text(
        "[torchrun.handlers]\nremesh = remesh.integrations.torchrun_entry:handler_creator\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(found.parent), os.environ.get("PYTHONPATH", "")])}


def _flags(port: int, nnodes: str, **conf: object) -> list[str]:
    found = meeting_flags(port, nnodes, "remesh", keep_alive_interval=1, keep_alive_max_attempt=8, **conf)
    return [*found, "--monitor-interval", "0.1", "--max-restarts", "2"]


@pytest.mark.slow
def test_job_goes_on_when_the_host_of_its_store_is_killed(tmp_path: Path) -> None:
    """Three nodes; the first hosts the store, and is gone with its worker: the other two meet in another store."""
    port, variables = free_port(), _with_entry_point(tmp_path)
    with PlainAgents(tmp_path, "torch.distributed.run") as agents:
        for _ in range(3):
            agents.start(*_flags(port, "2:3"), actions=["fail-when-told", "wait-for-5"], **variables)
            agents.wait_for_store(port)
        first = agents.wait_for_world(3)
        num_before = len(agents.workers())
        lost = {worker["pid"] for worker in first} & set(children_of(agents.agents[0].pid))
        assert len(lost) == 1
        agents.agents[0].send_signal(signal.SIGKILL)
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agents.agents[0].wait(TIMEOUT_S)
        (agents.told / "fail").touch()
        for index in (1, 2):
            code, output = agents.end(index)
            assert code == 0, output
            assert "lost the store at" in output
        told = agents.workers()[num_before:]
        assert {worker["WORLD_SIZE"] for worker in told} == {"2"}
        assert sorted(worker["RANK"] for worker in told) == ["0", "1"]


@pytest.mark.slow
def test_a_node_that_joins_later_restarts_the_others(tmp_path: Path) -> None:
    port, variables = free_port(), _with_entry_point(tmp_path)
    with PlainAgents(tmp_path, "torch.distributed.run") as agents:
        agents.start(*_flags(port, "1:2"), actions=["end-when-told"], **variables)
        agents.wait_for_workers(1)
        agents.start(*_flags(port, "1:2"), actions=["end-when-told"], **variables)
        agents.wait_for_world(2)
        (agents.told / "end").touch()
        for index in (0, 1):
            code, output = agents.end(index)
            assert code == 0, output
        sizes = [worker["WORLD_SIZE"] for worker in agents.workers()]
        assert sizes[-2:] == ["2", "2"] and set(sizes[:-2]) == {"1"}


@pytest.mark.slow
def test_a_node_with_another_token_is_kept_out(tmp_path: Path) -> None:
    port, variables = free_port(), _with_entry_point(tmp_path)
    with PlainAgents(tmp_path, "torch.distributed.run") as agents:
        agents.start(*_flags(port, "1:2"), actions=["sleep"], REMESH_TOKEN="0123456789abcdef", **variables)
        agents.wait_for_workers(1)
        agents.start(*_flags(port, "1:2"), REMESH_TOKEN="fedcba9876543210", **variables)
        code, output = agents.end(1)
        assert code == 1 and "the token does not fit" in output


def test_conf_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with PlainAgents(tmp_path, "torch.distributed.run") as agents:
        agents.start(*_flags(free_port(), "1", colour="blue"), **_with_entry_point(tmp_path))
        code, output = agents.end()
        assert code == 1 and "['colour']" in output
