"""The node that hosts the store is killed for real. Each test opens with the situation it stands for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from remesh.elasticity.store.endpoint import join_endpoint
from remesh.testbed.samples import SampleCount, count_samples
from remesh.wire.free_ports import free_port
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import tiny
from tests.support.hold import Hold

pytestmark = pytest.mark.procs
SCRIPT = str(Path(tiny.__file__))
QUIET_S = 90.0


def script(steps: int, *flags: str) -> list[str]:
    return [SCRIPT, "--mesh", "dp=-1", "--steps", str(steps), *flags]


def start(job: ForkedJob, nodes: str, hold: Hold, *flags: str) -> None:
    """All nodes, the first of which hosts the store; returns once they have trained together, and hold."""
    for node in nodes:
        job.start_node(node, "--last-call", "90", *flags)
        if node == nodes[0]:
            job.wait_for(lambda event: event["kind"] == "agent", QUIET_S)
    hold.wait(job, len(nodes), QUIET_S)


def count(job: ForkedJob, steps: int) -> SampleCount:
    found = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
    assert found.total == steps * tiny.BATCH_SIZE
    return found


@pytest.mark.long
def test_node_that_hosts_the_store_is_killed_and_a_newcomer_joins_the_survivors(tmp_path: Path) -> None:
    """Three nodes, SIGKILL to the whole first one. The others go on from the step they had; later a fourth comes."""
    ports = [free_port(), free_port()]
    endpoints = ("--rdzv-endpoint", ",".join(f"127.0.0.1:{port}" for port in ports))
    hold = Hold(tmp_path, 5)
    flags = script(120, "--full-size", "3", *hold.flags)
    with ForkedJob(tmp_path, flags, nnodes="1:3", workers_per_node=1, hosts_store=True) as job:
        start(job, "abc", hold, *endpoints)
        before = max(event["step"] for event in job.of_kind("step"))
        job.kill_node("a")
        hold.end()
        job.wait_for(lambda event: event["kind"] == "step" and event["generation"] == 2, QUIET_S)
        plan = job.of_kind("generation", number=2)[0]
        assert plan["axes"] == {"dp": 2} and plan["step"] >= before
        assert {event["host"] for event in job.of_kind("store-moved")} == {1}
        job.start_node("d", *endpoints)
        codes = job.wait(QUIET_S)
        assert codes == {"a": -signal.SIGKILL, "b": 0, "c": 0, "d": 0}, job.describe_logs()
        assert next(event["axes"] for event in job.of_kind("generation", number=3)) == {"dp": 3}
        assert all(event["bytes_from_disk"] == 0 for event in job.of_kind("filled"))
        assert count(job, 120).lost == 0


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_of_two_nodes_the_other_goes_on_alone(tmp_path: Path, address: str) -> None:
    """Two nodes and one endpoint; the host of the store is killed, its port refuses connections: that is proof."""
    hold = Hold(tmp_path, 5)
    place = ("--rdzv-endpoint", join_endpoint(address, free_port()), "--local-addr", address)
    with ForkedJob(tmp_path, script(40, *hold.flags), nnodes="1:2", workers_per_node=1, hosts_store=True) as job:
        start(job, "ab", hold, *place)
        job.kill_node("a")
        hold.end()
        assert job.wait(QUIET_S)["b"] == 0, job.describe_logs()
        assert count(job, 40) == SampleCount(lost=0, repeated=0, total=40 * tiny.BATCH_SIZE)


@pytest.mark.slow
def test_a_host_that_is_started_again_joins_the_job_where_it_went(tmp_path: Path) -> None:
    """It knows one endpoint, its own, at which the job began. It is told at its new store that the job is elsewhere."""
    hold, endpoint = Hold(tmp_path, 5), ("--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    flags = script(120, "--full-size", "2", *hold.flags)
    with ForkedJob(tmp_path, flags, nnodes="1:2", workers_per_node=1, hosts_store=True) as job:
        start(job, "ab", hold, *endpoint)
        job.kill_node("a")
        hold.end()
        job.wait_for(lambda event: event["kind"] == "step" and event["generation"] == 2, QUIET_S)
        job.start_node("a", *endpoint)
        assert job.wait(QUIET_S) == {"a": 0, "b": 0}, job.describe_logs()
        assert [event["axes"]["dp"] for event in job.of_kind("generation", number=3)] == [2, 2]
        assert count(job, 120).lost == 0


@pytest.mark.long
def test_store_on_a_host_that_stands_still_is_left(tmp_path: Path) -> None:
    """Three nodes; the agent that hosts the store is stopped (SIGSTOP) with its workers, and answers nothing more."""
    hold = Hold(tmp_path, 5)
    with ForkedJob(tmp_path, script(60, *hold.flags), nnodes="1:3", workers_per_node=1, hosts_store=True) as job:
        start(job, "abc", hold, "--leave-timeout", "3")
        for pid in [job.agents["a"].pid, *job.worker_pids("a")]:
            os.kill(pid, signal.SIGSTOP)
        hold.end()
        for event in job.follow(QUIET_S):
            if event["kind"] == "finish":
                break
        job.kill_node("a")
        codes = job.wait(QUIET_S)
        assert (codes["b"], codes["c"]) == (0, 0), job.describe_logs()
        assert count(job, 60).lost == 0
