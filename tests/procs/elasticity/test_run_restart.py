"""Scripts that know nothing of us run as under torchrun. Each test opens with the situation it stands for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from benchmarks.elastic.etcd_server import etcd_server, why_no_etcd
from remesh.wire.free_ports import free_port
from tests.procs.agents import TIMEOUT_S, Agents, PlainAgents, last_event_of_agent, meeting_flags

pytestmark = pytest.mark.procs

# What differs between two runs of the same command, or belongs to the process alone.
_OWN = {"pid", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TMPDIR", "_", "SHLVL"}


_BESIDE_TORCHRUN = ["remesh.run", pytest.param("torch.distributed.run", marks=pytest.mark.slow)]
"""What is expected of ours is what torch's launcher does, too."""


def own_variables(folder: Path, launcher: str) -> dict[str, dict[str, str]]:
    """Rank -> what a launcher put into a worker's environment."""
    folder.mkdir()
    with PlainAgents(folder, launcher) as agents:
        agents.start("--nproc-per-node=2", "--max_restarts=2", "--role=trainer", actions=["x", "${local_rank}"])
        code, output = agents.end()
        assert code == 0, output
        told = agents.workers()
    return {
        worker["RANK"]: {key: value for key, value in worker.items() if key not in _OWN and key not in os.environ}
        for worker in told
    }


def test_worker_sees_what_it_sees_under_torchrun(tmp_path: Path) -> None:
    """The same command line under both launchers: same variables, same arguments, macros filled in."""
    theirs = own_variables(tmp_path / "torchrun", "torch.distributed.run")
    ours = own_variables(tmp_path / "remesh", "remesh.run")
    assert ours == theirs
    assert [ours[rank]["argv"] for rank in "01"] == [["x", "0"], ["x", "1"]]
    assert ours["1"]["LOCAL_RANK"] == "1"


def test_failed_worker_of_one_node_restarts_all_and_uses_one_restart_there(tmp_path: Path) -> None:
    """Rank 3 fails once, when all have begun: both nodes' workers are started anew, and the second round ends well."""
    port = free_port()
    with Agents(tmp_path) as agents:
        flags = [*meeting_flags(port), "--nproc-per-node", "2", "--max-restarts", "1"]
        for _ in range(2):
            agents.start(*flags, actions=["wait-for-4@3", "raise-once@3", "wait-for-8"])
        codes = [agents.end(index)[0] for index in (0, 1)]
        assert codes == [0, 0], [agents.output(index) for index in (0, 1)]
        told = agents.workers()
        assert sorted(worker["RANK"] for worker in told) == sorted([*"0123"] * 2)
        assert sorted(worker["TORCHELASTIC_RESTART_COUNT"] for worker in told[4:]) == ["0", "0", "1", "1"]
        assert not agents.leftovers()


def test_failure_without_restarts_ends_all_nodes_with_one_cause(tmp_path: Path) -> None:
    """Rank 1 raises while the other node's workers would sit for minutes: both agents end, and name rank 1."""
    port = free_port()
    with Agents(tmp_path) as agents:
        for name in "ab":
            agents.start(*meeting_flags(port), "--node-name", name, actions=["wait-for-2", "record@1", "sleep"])
        ends = [agents.end(index) for index in (0, 1)]
        lines = [output.splitlines()[-1] for _, output in ends]
        for (code, output), line in zip(ends, lines, strict=True):
            assert code == 1, output
            assert "worker failure: the script's author must act" in line
            assert "rank 1" in line and "ValueError: recorded" in line
        assert "".join(output for _, output in ends).count("Traceback: as the script saw it") == 1
        assert not agents.leftovers()


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [1, 3])
def test_node_that_is_long_about_its_own_failure_is_not_told_that_the_network_failed(
    tmp_path: Path, stubborn: int
) -> None:
    """Ranks 0 and 2 fail on two nodes at once; one of them must kill a worker before it can tell."""
    port = free_port()
    with Agents(tmp_path) as agents:
        flags = [*meeting_flags(port), "--nproc-per-node", "2", "--shutdown-timeout", "25"]
        actions = ["wait-for-4", f"stubborn@{stubborn}", "when-stubborn", "exit@0", "exit@2", "sleep"]
        for name in "ab":
            agents.start(*flags, "--node-name", name, actions=actions)
        for index in (0, 1):
            code, output = agents.end(index)
            assert code == 1 and "exit code 3" in output.splitlines()[-1], output
        assert not agents.leftovers()


@pytest.mark.slow
def test_node_that_joins_restarts_the_others_and_uses_no_restart(tmp_path: Path) -> None:
    """nnodes 1:2, one node runs, another comes: a second round of two, although no restart is allowed."""
    port = free_port()
    events = tmp_path / "told" / "events"
    with Agents(tmp_path) as agents:
        flags = [*meeting_flags(port, "1:2"), "--events-dir", str(events)]
        agents.start(*flags, "--node-name", "a", actions=["sleep"])
        agents.wait_for_workers(1)
        agents.start(*flags, "--node-name", "b", actions=["sleep"])
        second = agents.wait_for_world(2)
        assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}
        for agent in agents.agents:
            agent.send_signal(signal.SIGTERM)
        codes = [agents.end(index)[0] for index in (0, 1)]
        assert codes[0] == 128 + signal.SIGTERM
        assert not agents.leftovers()
    log = [json.loads(line) for line in (events / "agent-a.jsonl").read_text().splitlines()]
    restarts = [event for event in log if event["kind"] == "restart"]
    assert restarts[0]["uses_restart"] is False
    sizes = [event["world_size"] for event in log if event["kind"] == "round"]
    assert sizes[0] == 1 and 2 in sizes


@pytest.mark.parametrize("launcher", _BESIDE_TORCHRUN)
def test_agent_says_last_that_its_job_failed(tmp_path: Path, launcher: str) -> None:
    """Rank 1 raises and no restart is left: the agent's own event comes all the same, as under torchrun."""
    with Agents(tmp_path, launcher) as agents:
        agents.start("--nproc-per-node", "2", "--event-log-handler", "console", actions=["raise@1", "sleep"])
        code, output = agents.end()
        assert code == 1, output
        # The agent has done its work; that its workers failed stands in their events.
        assert last_event_of_agent(output)["metadata"]["state"] == "SUCCEEDED"
        assert '"state": "FAILED"' in output


@pytest.mark.parametrize("launcher", _BESIDE_TORCHRUN)
def test_agent_that_is_told_to_end_says_so_last(tmp_path: Path, launcher: str) -> None:
    """SIGTERM to the agent while its workers run."""
    with Agents(tmp_path, launcher) as agents:
        agents.start("--nproc-per-node", "2", "--event-log-handler", "console", actions=["sleep"])
        agents.wait_for_workers(2)
        agents.agents[0].send_signal(signal.SIGTERM)
        code, output = agents.end()
        assert code != 0, output
        last = last_event_of_agent(output)["metadata"]
        assert last["state"] == "FAILED" and "SignalException" in last["raw_error"]


@pytest.mark.slow
def test_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    """Rank 1 raises; rank 0 ignores SIGTERM. The job ends all the same, and nothing runs on."""
    with Agents(tmp_path) as agents:
        agents.start(
            "--nproc-per-node", "2", "--shutdown-timeout", "1", actions=["stubborn@0", "when-stubborn@1", "raise@1"]
        )
        code, output = agents.end()
        assert code == 1, output
        assert "ValueError: the sky is falling" in output
        assert not agents.leftovers()


@pytest.mark.slow
def test_script_that_ends_at_once_is_a_worker_failure(tmp_path: Path) -> None:
    """Every rank calls sys.exit(3) in its first line."""
    with Agents(tmp_path) as agents:
        agents.start("--nproc-per-node", "2", actions=["exit"])
        exit_code, output = agents.end()
        assert exit_code == 1
        assert "failed, exit code 3" in output.splitlines()[-1]
        assert not agents.leftovers()


def test_two_jobs_with_one_name_are_told_apart(tmp_path: Path) -> None:
    """Another script under the same name and store: the second is refused, the first goes on."""
    port = free_port()
    other = tmp_path / "told" / "other.py"
    with Agents(tmp_path) as agents:
        other.write_text("raise SystemExit('must not run')")
        agents.start(*meeting_flags(port, "1"), actions=["sleep"])
        agents.wait_for_workers(1)
        agents.start(*meeting_flags(port, "1"), script=str(other))
        code, output = agents.end(1)
        assert code == 2, output
        assert "script is 'plain.py' there and 'other.py' here" in output
        agents.start(*meeting_flags(port, "1"), actions=["sleep"], REMESH_TOKEN="a-secret-of-another-job")
        code, output = agents.end(2)
        assert code == 2, output
        assert "token does not fit" in output and "a-secret-of" not in output
        assert agents.agents[0].poll() is None


def test_taken_port_is_an_input_error(tmp_path: Path) -> None:
    """Fixed ranks, and somebody else listens on the master's port."""
    with Agents(tmp_path) as agents:
        with socket.create_server(("127.0.0.1", 0)) as server:
            agents.start("--master-port", str(server.getsockname()[1]))
            code, output = agents.end()
        assert code == 2, output
        assert "its port is taken" in output.splitlines()[-1]
        assert not agents.leftovers()


def test_fixed_ranks_meet_without_a_name(tmp_path: Path) -> None:
    """--node-rank and --master-addr, as in old scripts; logs go to files and to the console."""
    port = str(free_port())
    logs = tmp_path / "told" / "logs"
    with Agents(tmp_path) as agents:
        for rank in ("0", "1"):
            agents.start(
                *("--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port),
                *("--tee", "3", "--log-dir", str(logs)),
            )
        for index in (0, 1):
            code, output = agents.end(index)
            assert code == 0, output
            assert f"[default0]:rank {index} says hello" in output
        assert {(one["RANK"], one["WORLD_SIZE"]) for one in agents.workers()} == {("0", "2"), ("1", "2")}
        assert len(list(logs.glob("none_*/attempt_0/0/stdout.log"))) == 2
        assert not agents.leftovers()


def test_nodes_meet_on_etcd_and_survive_a_dead_one(tmp_path: Path) -> None:
    """Two nodes on etcd; the first is killed whole. The other one goes on alone."""
    if missing := why_no_etcd():
        pytest.skip(missing)
    with etcd_server(tmp_path) as port, Agents(tmp_path) as agents:
        # A living node that is silent for longer than this is given up by the others, and then each trains alone.
        flags = meeting_flags(port, "1:2", "etcd", keep_alive_interval=1, keep_alive_max_attempt=6)
        for _ in range(2):
            agents.start(*flags, "--max-restarts", "3", actions=["sleep"])
        # One of them may be quicker than the last call; the other then makes a second round.
        count = 2
        while sum(worker["WORLD_SIZE"] == "2" for worker in agents.wait_for_workers(count)) < 2:
            count += 1
        victim = agents.agents[0]
        victim.kill()
        victim.wait(TIMEOUT_S)
        # Its workers die with it, and the survivor's fail at their next collective.
        for worker in agents.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker["pid"], signal.SIGKILL)
        survivor = agents.wait_for_workers(count + 1)[-1]
        assert survivor["WORLD_SIZE"] == "1"


def test_metrics_of_a_running_job_can_be_scraped(tmp_path: Path) -> None:
    """A scraper asks while workers run."""
    port = free_port()
    with Agents(tmp_path) as agents:
        agents.start("--metrics-port", str(port), "--nproc-per-node", "2", actions=["sleep"])
        agents.wait_for_workers(2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        assert "remesh_world_size 2" in text and text.endswith("# EOF\n")
        agents.agents[0].send_signal(signal.SIGINT)
        assert agents.end()[0] == 128 + signal.SIGINT
