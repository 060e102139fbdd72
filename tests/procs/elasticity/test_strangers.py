"""Strangers talk to every port of a running job: it goes on, and they get nothing.

Agents are started as users start them: what the kernel tells of a process is part of what is looked at.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import pytest

from remesh.elasticity.link import connect_agent
from remesh.elasticity.telemetry.metrics_server import MetricsServer
from remesh.testbed.local_job import LocalJob
from tests.procs.scripts import tiny
from tests.support.hold import Hold

pytestmark = pytest.mark.procs
SCRIPT = str(Path(tiny.__file__))
QUIET_S = 90.0
_LISTEN = "0A"


def listening_ports(pid: int) -> dict[int, str]:
    """TCP port -> address in hexadecimal, of every port on which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN and fields[9] in inodes:
            address, port = fields[1].split(":")
            found[int(port, 16)] = address
    return found


def annoy(port: int, chance: random.Random, times: int) -> None:
    """Connect and send garbage, or half a request, or nothing; leave at once, or by a reset."""
    for _ in range(times):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as stranger:
            start = chance.choice([b"", b"GET /metrics HTTP/1.1\r\n", b'{"type": "ready"}\n', b"\xff" * 64 + b" {}\n"])
            stranger.sendall(start + chance.randbytes(chance.randrange(2000)))
            if chance.random() < 0.5:
                # Closing with this option set sends a reset.
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def annoy_link(worker_pid: int) -> None:
    """Write nonsense where a worker writes to its agent, as a process of the same user may, with the token or not."""
    environment = Path(f"/proc/{worker_pid}/environ").read_bytes().split(b"\0")
    link = os.fsdecode(next(one for one in environment if one.startswith(b"REMESH_LINK=")).partition(b"=")[2])
    for garbage in (b"no json\n", b"[]\n", b'{"type": "ready"}\n' * 10, b"\0" * 100):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(link)
            stranger.sendall(garbage)
    for message in ({"type": "unknown"}, {"type": "ready"}, {"type": "keep"}):
        with connect_agent(link) as line:
            line.send(message)
            assert line.receive(QUIET_S) is None


@pytest.mark.slow
def test_garbage_on_every_port_of_an_agent_does_not_disturb_the_job(tmp_path: Path) -> None:
    """Agents listen on loopback only; hundreds of strangers, and dozens that stay and say nothing."""
    hold, chance = Hold(tmp_path, 10), random.Random(11)
    flags = [SCRIPT, "--mesh", "dp=-1", "--steps", "20", "--snapshot-every", "5", "--fsdp", *hold.flags]
    with LocalJob(tmp_path, flags, nnodes="2", workers_per_node=1) as job, contextlib.ExitStack() as stack:
        job.start_node("a", "--metrics-port", "0")
        job.start_node("b")
        hold.wait(job, 2, QUIET_S)
        for agent in job.agents.values():
            ports = listening_ports(agent.pid)
            assert len(ports) >= 2, job.describe_logs()
            assert set(ports.values()) == {"0100007F"}, "some port does not listen on loopback"
            for port in ports:
                for _ in range(20):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0))
                annoy(port, chance, 100)
        annoy_link(job.worker_pids("a")[0])
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0, "b": 0}, job.describe_logs()
        assert {event["number"] for event in job.of_kind("generation")} == {1}
        assert job.of_kind("snapshot-kept")
        assert len(job.of_kind("message-refused")) >= 5


@pytest.mark.slow
def test_node_with_another_token_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    """The secret shows nowhere: not among the arguments of any process, not in a log."""
    secrets = [tmp_path / "right", tmp_path / "wrong"]
    for index, path in enumerate(secrets):
        path.write_text(f"a-secret-that-nobody-guesses-{index}")
    hold = Hold(tmp_path, 5)
    flags = [SCRIPT, "--mesh", "dp=-1", "--steps", "10", *hold.flags]
    with LocalJob(tmp_path, flags, nnodes="1:2", workers_per_node=1) as job:
        job.start_node("a", "--token-file", str(secrets[0]), "--last-call", "0")
        hold.wait(job, 1, QUIET_S)
        pids = [job.agents["a"].pid, *job.worker_pids("a")]
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        job.start_node("b", "--token-file", str(secrets[1]), "--last-call", "0")
        assert job.agents["b"].wait(QUIET_S) == 2, job.describe_logs()
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0, "b": 2}, job.describe_logs()
        assert "token does not fit" in job.log_of("b").read_text()
        told = b"".join([*commands, *(path.read_bytes() for path in tmp_path.rglob("*.log"))])
        told += b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
        assert b"nobody-guesses" not in told


def test_slow_scrapers_are_dropped_and_the_next_one_is_served() -> None:
    with MetricsServer(0, lambda: "# EOF\n") as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        annoy(server.port, random.Random(3), 20)
        with socket.create_connection(("127.0.0.1", server.port), 30.0) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while more := scraper.recv(4096):
                answer += more
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"# EOF\n")
        for one in silent:
            one.close()
