"""Launchers reach several hosts through the real ssh: a daemon on each host of a bed, and no rsh of the testbed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import remesh
from remesh.carried.rounds.job_folder import JobFolder, rank_name
from remesh.testbed import BedSpec, Testbed
from tests.mpi.conftest import FOREIGN, PROGRAMS
from tests.mpi.patience import communicate_patiently, wait_until
from tests.procs.carried.torch_jobs import PROGRAMS as TORCH_PROGRAMS, run_natively

pytestmark = pytest.mark.netns

_RING = "answer b1cd1c8a14377307"
_HOSTS = ("a", "b", "c")
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
_TO_END_S = 60.0
"""For what was told to end."""


class Cluster:
    """A head from which jobs are led, and hosts with an ssh daemon each."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.gate = folder / "gate"
        # The client reads no configuration from HOME, so one stands in front of it on the PATH.
        self._environment = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(Path(remesh.__file__).parents[1]), str(FOREIGN)]),
            "TEST_GATE": str(self.gate),
        }

    def remesh(self, *arguments: str) -> tuple[int, str]:
        """Run ``remesh`` on the head; its status and what it said."""
        command = [sys.executable, "-m", "remesh", *arguments]
        process = self.bed.start_program("head", command, env=self._environment, output=subprocess.PIPE)
        try:
            said, _ = communicate_patiently(process)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, _ = communicate_patiently(process)
        return process.returncode, said.decode()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The same, without waiting for it."""
        command = [sys.executable, "-m", "remesh", *arguments]
        with (self.folder / "said").open("wb") as output:
            return self.bed.start_program("head", command, env=self._environment, output=output)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    daemon, client, keygen = (shutil.which(name, path=_PATH) for name in ("sshd", "ssh", "ssh-keygen"))
    if daemon is None or client is None or keygen is None:
        pytest.skip("needs sshd, ssh and ssh-keygen, as of Debian's openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"key-{name}")], check=True)
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/key-host\nAuthorizedKeysFile {folder}/key-user.pub\nPermitRootLogin yes\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/key-user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        "BatchMode yes\nConnectTimeout 20\n"
    )
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {client} -F {folder}/ssh_config "$@"\n')
    (folder / "ssh").chmod(0o700)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where the daemon locks itself in
    with Testbed(BedSpec.parse(",".join(f"{host}=full" for host in ("head", *_HOSTS)))) as bed:
        daemons = [
            bed.start_program(host, [daemon, "-D", "-e", "-f", str(folder / "sshd_config")], output=subprocess.DEVNULL)
            for host in _HOSTS
        ]
        try:
            made = Cluster(bed, folder)
            for host in _HOSTS:
                _wait_for_daemon(made, host)
            yield made
        finally:
            for each in daemons:
                each.terminate()
                each.wait(_TO_END_S)


def _wait_for_daemon(cluster: Cluster, host: str) -> None:
    said = b""

    def answers() -> bool:
        nonlocal said
        command = [str(cluster.folder / "ssh"), host, "hostname"]
        tried = cluster.bed.start_program("head", command, output=subprocess.PIPE)
        said, _ = communicate_patiently(tried)
        return tried.returncode == 0

    wait_until(answers, lambda: said.decode())
    assert said.decode().strip() == host


@pytest.mark.mpi
@pytest.mark.parametrize(("before", "after"), [("openmpi", "mpich"), ("mpich", "impi"), ("impi", "openmpi")])
def test_a_job_runs_stops_and_goes_on_over_ssh(cluster: Cluster, tmp_path: Path, before: str, after: str) -> None:
    job = tmp_path / "j"
    how = ("--mpi", before, "--hosts", "a,b", "--job", str(job))
    folder = _stop_once(cluster, job, "mpi", "-n", "4", *how, str(PROGRAMS / "ring.py"), "30", "0.2")
    assert {rank["host"] for rank in _ranks(folder)} == {"a", "b"}
    _finish(cluster, folder, "mpi", "--mpi", after, "--hosts", "b:3,a:1")
    assert _RING in _printed(folder, 0)


def test_a_program_of_torch_stops_and_goes_on_on_another_host_over_ssh(cluster: Cluster, tmp_path: Path) -> None:
    job, program = tmp_path / "j", ("100", str(cluster.gate))
    how = ("--hosts", "a:1,b:1", "--job", str(job))
    folder = _stop_once(cluster, job, "torch", *how, str(TORCH_PROGRAMS / "steady.py"), *program)
    assert {rank["host"] for rank in _ranks(folder)} == {"a", "b"}
    _finish(cluster, folder, "torch", "--hosts", "c:2")
    assert sorted([*_printed(folder, 0), *_printed(folder, 1)]) == run_natively("steady.py", 2, *program)


def _stop_once(cluster: Cluster, job: Path, kind: str, *arguments: str) -> JobFolder:
    """A job that was started, and stopped by a checkpoint once it ran."""
    cluster.gate.unlink(missing_ok=True)
    running = cluster.start(kind, "run", *arguments)
    try:
        _wait_until_it_runs(job, running, cluster)
        status, said = cluster.remesh(kind, "checkpoint", "--stop", str(job))
        assert status == 0, said
        wait_until(lambda: running.poll() is not None)
        assert running.returncode == 0
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait(_TO_END_S)
    return JobFolder(job)


def _finish(cluster: Cluster, folder: JobFolder, kind: str, *placed: str) -> None:
    cluster.gate.touch()
    status, said = cluster.remesh(kind, "restart", str(folder.path), *placed)
    assert status == 0, said
    assert folder.read_state().state == "finished"


def _printed(folder: JobFolder, rank: int) -> list[str]:
    return (folder.logs / rank_name(rank)).with_suffix(".out").read_text().splitlines()


def _wait_until_it_runs(job: Path, running: subprocess.Popen[bytes], cluster: Cluster) -> None:
    def runs() -> bool:
        return (job / "state.json").exists() and JobFolder(job).read_state().state == "running"

    wait_until(lambda: runs() or running.poll() is not None, (cluster.folder / "said").read_text)
    assert running.poll() is None, (cluster.folder / "said").read_text()


def _ranks(folder: JobFolder) -> list[dict[str, object]]:
    """The ranks of the first start, as its event tells them."""
    line = next(line for line in (folder.logs / "events.log").read_text().splitlines() if " running: " in line)
    told: list[dict[str, object]] = json.loads(
        line.partition(" running: ")[2].replace("'", '"').replace("None", "null")
    )
    return told
