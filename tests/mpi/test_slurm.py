"""The batch script runs under the real Slurm: its job is stopped by SIGTERM, queues itself again and goes on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import remesh
from remesh.carried.hosts.slurm import BatchLaunch, make_script
from remesh.carried.rounds.job_folder import JobFolder
from remesh.testbed import BedSpec, Testbed
from tests.mpi.conftest import FOREIGN, PROGRAMS
from tests.mpi.patience import communicate_patiently, wait_until
from tests.procs.carried.torch_jobs import PROGRAMS as TORCH_PROGRAMS

pytestmark = [pytest.mark.long, pytest.mark.netns]

_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
_NODES = ("node0", "node1")
_CONF = """\
ClusterName=bed
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=1000000
SelectType=select/cons_tres
ReturnToService=2
KillWait=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
NodeName=node0,node1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A controller and two nodes on the hosts of a bed."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self._bed = bed
        self.folder = folder
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join([str(Path(remesh.__file__).parents[1]), str(FOREIGN)]),
            "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), _PATH]),
        }

    def start(self, host: str, name: str) -> subprocess.Popen[bytes]:
        command = [name, "-D", "-f", str(self.folder / "slurm.conf")]
        with (self.folder / f"{name}-{host}.log").open("wb") as output:
            return self._bed.start_program(host, command, env=self.environment, output=output)

    def run(self, *command: str) -> str:
        """What a command says on the first node; it must end well."""
        process = self._bed.start_program("node0", command, env=self.environment, output=subprocess.PIPE)
        try:
            said, _ = communicate_patiently(process)
        except subprocess.TimeoutExpired:
            process.kill()
            communicate_patiently(process)
            raise
        assert process.returncode == 0, said.decode()
        return said.decode()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, as of Debian's slurmctld and slurmd")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
    # The hosts of a bed have a /sys of their own, without control groups; nothing here asks for them.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "remesh").write_text(f'#!/bin/sh\nexec {sys.executable} -m remesh "$@"\n')
    (folder / "remesh").chmod(0o700)
    for name in ("state", *(f"spool-{node}" for node in _NODES)):
        (folder / name).mkdir()
    with Testbed(BedSpec.parse(",".join(f"{node}=full" for node in _NODES))) as bed:
        made = Cluster(bed, folder)
        daemons = [made.start("node0", "slurmctld"), *(made.start(node, "slurmd") for node in _NODES)]
        try:
            _wait_for(lambda: made.run("sinfo", "-h", "-o", "%T %D").strip() == "idle 2", lambda: made.run("sinfo"))
            yield made
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(60)


def _wait_for(is_so: Callable[[], bool], tell: Callable[[], str]) -> None:
    """Daemons that come up, and files that are not there yet, fail to answer for a while."""

    def is_so_by_now() -> bool:
        with contextlib.suppress(AssertionError, OSError):
            return is_so()
        return False

    wait_until(is_so_by_now, tell, pace_s=0.5)


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_job_is_stopped_before_its_time_is_up_and_goes_on_in_the_next(
    cluster: Cluster, tmp_path: Path, mpi: str
) -> None:
    launch = BatchLaunch("mpi", ("-n", "4"), ("--mpi", mpi))
    job = _stopped_once(cluster, tmp_path, launch, [str(PROGRAMS / "ring.py"), "30", "0.5"])
    assert "answer b1cd1c8a14377307" in (job.logs / "rank-0000.out").read_text().splitlines()
    assert len(list((job.path / "stays").iterdir())) == 2


def test_a_program_of_torch_is_stopped_and_goes_on_in_the_next(cluster: Cluster, tmp_path: Path) -> None:
    job = _stopped_once(cluster, tmp_path, BatchLaunch("torch"), [str(TORCH_PROGRAMS / "ddp.py"), "5000"])
    *steps, end = (job.logs / "rank-0000.out").read_text().splitlines()
    assert [int(line.split()[0]) for line in steps] == list(range(1, 5001))
    assert end.startswith("end 0 ")


def _stopped_once(cluster: Cluster, folder: Path, launch: BatchLaunch, command: list[str]) -> JobFolder:
    """A job of four ranks on two nodes, told to stop once while it runs, and finished."""
    path, out, script = folder / "j", folder / "out", folder / "script"
    script.write_text(make_script(4, launch, str(path), command))
    told = cluster.run("sbatch", "--nodes=2", "--ntasks-per-node=2", f"--output={out}", str(script))
    number = re.findall(r"\d+", told)[0]
    job = JobFolder(path)

    def tell() -> str:
        events = job.logs / "events.log"
        return cluster.run("scontrol", "show", "job", number) + _text(out) + _text(events)

    _wait_for(lambda: job.read_state().state == "running", tell)
    cluster.run("scancel", "--signal=TERM", "--batch", number)
    _wait_for(lambda: "checkpoint 1: committed" in _text(job.logs / "events.log"), tell)
    _wait_for(lambda: job.read_state().state == "finished", tell)
    _wait_for(lambda: "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", number), tell)
    return job


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
