"""Restart mode: after a worker was killed, the very next attempt of all comes through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.procs.agents import Agents, etcd_server, free_port, meeting_flags
from tests.procs.scripts import meets

pytestmark = pytest.mark.procs
SCRIPT = str(Path(meets.__file__))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path) as found:
        yield found


def attempts(agents: Agents) -> list[str]:
    """``rank-attempt`` of every worker that ran, and of those that came through with ``ok-`` before it."""
    return sorted(path.name.rpartition("-")[0] for path in agents.told.iterdir())


EXPECTED = ["0-0", "0-1", "1-0", "1-1", "ok-0-1", "ok-1-1"]


def test_workers_of_one_node_meet_at_the_first_attempt_after_a_kill(agents: Agents) -> None:
    flags = "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--event-log-handler", "console"
    agents.start(*flags, script=SCRIPT)
    code, output = agents.end()
    assert (code, attempts(agents)) == (0, EXPECTED), output
    assert "failed, killed by signal 9: all workers of" in output
    assert "are started again; 2 restarts left" in output
    # torch's own events, as under torchrun: of each worker, and of the agent as the last.
    told = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"source": "AGENT"' in line]
    assert told, output
    assert told[-1]["metadata"]["state"] == "SUCCEEDED"


@pytest.mark.parametrize("backend", ["static", "c10d", "etcd"])
def test_workers_of_two_nodes_meet_at_the_first_attempt_after_a_kill(agents: Agents, backend: str) -> None:
    if backend == "etcd" and shutil.which("etcd") is None:
        pytest.skip("needs etcd")
    with ExitStack() as stack:
        port = stack.enter_context(etcd_server(agents.folder)) if backend == "etcd" else free_port()
        for node in range(2):
            flags = meeting_flags(port, backend=backend)
            if backend == "static":
                flags = ["--nnodes", "2", "--node-rank", str(node), "--master-port", str(port)]
            agents.start(*flags, "--max-restarts", "3", script=SCRIPT)
        ends = [agents.end(node) for node in range(2)]
        assert ([code for code, _ in ends], attempts(agents)) == ([0, 0], EXPECTED), ends
