"""Run of an MPI job on a set of hosts, from the launcher's start to its end: `run_job_once`.

    testbed (if hosts are made here) ── listeners ── launcher ── coordinator's steps until an outcome ── tidy up

The launcher only starts the ranks; the job's outcome comes from the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from remesh import testbed
from remesh.carried.hosts.apart import check_apart
from remesh.carried.hosts.host_list import Host, assign_slots
from remesh.carried.hosts.job_hosts import JobHosts, make_testbed
from remesh.carried.hosts.rank_folder import clear_rank_folders, find_place
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.mpi import rsh
from remesh.carried.mpi.launch import LaunchCommand, Reach, default_network, find_row, plan_start
from remesh.carried.mpi.mpis import Installation, find_mpi
from remesh.carried.mpi.program_environment import lower_environment, rank_environment
from remesh.carried.mpi.together import check_together
from remesh.carried.rounds.checkpointing import Settings
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, JobState
from remesh.carried.rounds.leader import Coordinator, JobOutcome
from remesh.carried.rounds.signals import obeying_signals
from remesh.foundation.errors import StorageError
from remesh.foundation.source_folder import SOURCE
from remesh.testbed.inside import HostEntry, command_inside

_POLL_S = 0.1
_RANKS_GRACE_S = 15.0
"""Time after the outcome in which ranks give MPI back what is its own."""
_LAUNCHER_GRACE_S = 5.0
"""Time between the polite end of a launcher and the forced one."""
_BRIDGE = "core"
"""Interface of a testbed's switch, where launchers run."""
"""The folder from which ``remesh`` is imported: also in the environment of an MPI, which does not have it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a job: its hosts, and the MPI and network that run it."""

    mpi: str
    """Name of an MPI, as `find_mpi` knows it."""
    network: str | None = None
    """Name of a network, as `launch.ROWS` has it; None for the usual one."""
    hosts: tuple[Host, ...] = ()
    """Empty: this host."""
    testbed_rate: str | None = None
    """Rate of the links between hosts that are made on this machine; None: the hosts are real."""

    def describe(self) -> dict[str, object]:
        """The placement as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class JobRun:
    """The result of a run."""

    outcome: JobOutcome
    last_checkpoint: Mapping[str, object] | None
    """The coordinator's report of the last checkpoint of this run."""
    ready_seconds: Mapping[int, Mapping[str, float]]
    """Time that each rank took to come up, by phase."""
    nic_bytes: Mapping[str, int]
    """Bytes that left each host of a testbed; empty otherwise."""


@dataclass(frozen=True, slots=True)
class RunSettings(Settings):
    """The settings of a job's checkpoints, and of its return from one."""

    open_files: OpenFilePolicy = OpenFilePolicy.TRUNCATE
    """The policy at a restart for files that the program had open for writing."""


Watch = Callable[[Coordinator], None]
"""A callback that is called again and again while the job runs."""


def find_launch(placement: Placement) -> tuple[Installation, str]:
    """The MPI of a placement and its network; `ConfigError` if one of them is not there."""
    installation = find_mpi(placement.mpi)
    network = placement.network or default_network(installation.kind, placement.hosts)
    return installation, find_row(installation.kind, network, num_hosts=len(placement.hosts)).network


def run_job_once(
    folder: JobFolder,
    placement: Placement,
    settings: RunSettings,
    checkpoint: Checkpoint | None,
    watch: Watch | None = None,
) -> JobRun:
    """Run the job on these hosts, from its beginning or from a checkpoint, until it ends or stops.

    SIGTERM takes a checkpoint and stops, or while a restart comes up stops at once; SIGINT ends the job. Both only when
    called in the main thread.
    """
    spec = folder.read_spec()
    installation, network = find_launch(placement)
    if checkpoint is not None:
        ranks, doing = checkpoint.manifest["ranks"], f"restarting job {folder.name}"
        slots = assign_slots(placement.hosts or (Host(socket.gethostname(), spec.num_ranks),))
        check_together(ranks, [slot.host for slot in slots], doing)
        check_apart(ranks, slots, doing)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.lead())
        coordinator = Coordinator(folder, spec.num_ranks, settings, begun_from=checkpoint)
        stack.callback(coordinator.close)
        stack.enter_context(obeying_signals(coordinator))
        room = _make_room(folder)
        bed = None
        if placement.testbed_rate is not None:
            bed = stack.enter_context(make_testbed(placement.hosts, placement.testbed_rate))
        job_hosts = JobHosts(placement.hosts, bed)
        for_ranks = job_hosts.listen()
        for_clients = job_hosts.listen_for_clients(for_ranks)
        for each in {for_ranks.socket, for_clients.socket}:
            coordinator.listen(each)
        reach, hosts = Reach(machine_file=_machine_file(room)), placement.hosts
        if bed is not None:
            reach, hosts = reach_into(bed, placement.hosts, room)
        launched = {**placement.describe(), "network": network}
        folder.write_state(
            JobState("starting", "", (for_clients.address,), os.getpid(), socket.gethostname(), launched),
        )
        which = () if checkpoint is None else (str(checkpoint.number), settings.open_files.value)
        rank_command = _rank_command(installation.python, folder, for_ranks.address, which)
        start = plan_start(installation, network, spec.num_ranks, hosts, reach, rank_command)
        # A stay that was killed has left its folders; one that lives has locked its own.
        stack.callback(clear_rank_folders, find_place())
        launcher = _start_launcher(start, job_hosts.entry)
        stack.callback(_end_launcher, launcher)
        outcome = _lead(coordinator, launcher, watch)
        nic_bytes = {} if bed is None else {name: bed.nic_bytes(name).sent for name in bed.spec.names}
        return JobRun(outcome, coordinator.last_checkpoint, coordinator.ready_seconds, nic_bytes)


def _lead(coordinator: Coordinator, launcher: subprocess.Popen[bytes], watch: Watch | None) -> JobOutcome:
    while coordinator.outcome is None:
        coordinator.step(_POLL_S if watch is None else _POLL_S / 10)
        if watch is not None:
            watch(coordinator)
        if coordinator.outcome is None and launcher.poll() is not None:
            # The last messages of the ranks may still be on their way.
            deadline_s = time.monotonic() + 1.0
            while coordinator.outcome is None and time.monotonic() < deadline_s:
                coordinator.step(_POLL_S)
            what = "before every rank had come up" if not coordinator.all_ready else "while the job ran"
            coordinator.fail(f"the launcher ended with exit status {launcher.returncode} {what}; see what it printed")
    deadline_s = time.monotonic() + (_RANKS_GRACE_S if coordinator.outcome.exit_code == 0 else 1.0)
    while launcher.poll() is None and time.monotonic() < deadline_s:
        coordinator.step(_POLL_S / 5)
    assert coordinator.outcome is not None
    return coordinator.outcome


def _make_room(folder: JobFolder) -> Path:
    """Make a folder for the files of this run."""
    number = 1
    while True:
        room = folder.path / "stays" / f"{number:04d}"
        try:
            room.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise StorageError(f"making {room}: {error.strerror}; check its free space and permissions") from error
        else:
            return room


def reach_into(bed: testbed.Testbed, hosts: Sequence[Host], room: Path) -> tuple[Reach, tuple[Host, ...]]:
    """Describe how a launcher at the bed's switch gets to its hosts, and what it calls them; files go to ``room``."""
    reach = Reach(agent=_write_agent(room, bed, hosts), interface=_BRIDGE, machine_file=_machine_file(room))
    return reach, tuple(replace(host, name=bed.address_of(host.name)) for host in hosts)


def _machine_file(room: Path) -> str:
    return str(room / "machines")


def _write_agent(room: Path, bed: testbed.Testbed, hosts: Sequence[Host]) -> str:
    """Write the program that launchers take for ssh."""
    entries = room / "doors.json"
    rsh.write_entries(entries, {bed.address_of(host.name): bed.entry_of(host.name) for host in hosts})
    agent = room / "rsh"
    command = shlex.join(["env", f"PYTHONPATH={SOURCE}", sys.executable, "-m", "remesh.carried.mpi.rsh", str(entries)])
    agent.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    agent.chmod(0o700)
    return str(agent)


def _rank_command(python: str, folder: JobFolder, address: tuple[str, int], which: tuple[str, ...]) -> tuple[str, ...]:
    # Launchers pass different parts of the environment on; what the rank needs stands in its command.
    variables = {"PYTHONPATH": SOURCE, **rank_environment(os.environ)}
    words = (str(folder.path), f"{address[0]}:{address[1]}", *which)
    return (
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
        python,
        "-m",
        "remesh.carried.mpi.lower",
        *words,
    )


def _start_launcher(start: LaunchCommand, entry: HostEntry | None) -> subprocess.Popen[bytes]:
    for path, text in start.files.items():
        Path(path).write_text(text)
    command = list(start.command) if entry is None else command_inside(entry, start.command)
    return subprocess.Popen(
        command,
        env={**lower_environment(os.environ, start.command[0]), **start.environment},
        stdin=subprocess.DEVNULL,
        # A signal for us is for us alone: the launcher must not end ranks that are to be saved.
        start_new_session=True,
    )


def _end_launcher(launcher: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(launcher.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_LAUNCHER_GRACE_S)
            return
