"""Run of a torch.distributed job on its hosts, from its start to its end: `run_job_once`, called by its leader.

testbed (if hosts are made here) ── store ── coordinator ── on each host a keeper for each of its ranks ──
the coordinator's steps until an outcome ── tidy up
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from remesh import testbed
from remesh.carried.hosts.apart import check_apart
from remesh.carried.hosts.host_list import Host, assign_slots, describe_hosts, is_loopback
from remesh.carried.hosts.job_hosts import Entrance, JobHosts, make_testbed
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.rounds.checkpointing import Settings
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, JobSpec, JobState
from remesh.carried.rounds.leader import Coordinator, JobOutcome
from remesh.carried.rounds.signals import obeying_signals
from remesh.carried.torch.notice import GROWTH_PREFIX
from remesh.carried.torch.reach import command_on
from remesh.carried.torch.store_server import ProgramStore
from remesh.foundation.errors import ConfigError, FormatError, StorageError
from remesh.foundation.files import write_new

KIND: Final = "torch"
"""The kind of these jobs: the verb that they belong to."""
_STORE_FILE: Final = "store.json"
_POLL_S: Final = 0.05
_KEEPERS_GRACE_S: Final = 15.0
"""After the outcome keepers have this long to end by themselves."""


@dataclass(frozen=True, slots=True)
class TorchPlacement:
    """Where a job runs."""

    hosts: tuple[Host, ...] = ()
    """The job's hosts; empty for this host alone."""
    testbed_rate: str | None = None
    """Rate of the links, if the hosts are made on this machine; None if they are real."""
    interface: str = ""
    """For gloo, on every host; "" for the one in the program's environment, or else the one towards the other hosts."""

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"placing ranks: {', '.join(twice)} is named twice; name each host once")
        own = [name for name in names if is_loopback(name)]
        if self.testbed_rate is None and own and len(own) < len(names):
            raise ConfigError(
                f"placing ranks: other hosts cannot call {', '.join(own)}; name this host as they know it"
            )


@dataclass(frozen=True, slots=True)
class TorchSettings(Settings):
    """How a job takes its checkpoints, and comes back from one."""

    open_files: OpenFilePolicy = OpenFilePolicy.TRUNCATE
    """What a restart does with files that the program had open for writing."""


def run_job_once(
    folder: JobFolder,
    placement: TorchPlacement,
    settings: TorchSettings,
    checkpoint: Checkpoint | None,
) -> JobOutcome:
    """Run the job on these hosts, from its beginning or from a checkpoint, until it ends or stops.

    SIGTERM takes a checkpoint and stops, or while a restart comes up stops at once; SIGINT ends the job. Both only when
    called in the main thread.
    """
    spec = folder.read_spec()
    hosts = placement.hosts or (Host(socket.gethostname(), spec.num_ranks),)
    content = {} if checkpoint is None else _read_store(checkpoint, spec)
    if checkpoint is not None:
        check_apart(checkpoint.manifest["ranks"], assign_slots(hosts), f"restarting job {folder.name}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.lead())
        bed = None
        if placement.testbed_rate is not None:
            bed = stack.enter_context(make_testbed(placement.hosts, placement.testbed_rate))
        job_hosts = JobHosts(placement.hosts, bed)
        for_store, for_ranks = job_hosts.listen(), job_hosts.listen()
        for_clients = job_hosts.listen_for_clients(for_ranks)
        store = stack.enter_context(ProgramStore(folder.read_token(), for_store.socket, content, folder.log_event))
        made_by = {"torch": [_torch_version()], "script": [_digest_of_script(spec)]}
        coordinator = Coordinator(
            folder,
            spec.num_ranks,
            settings,
            lambda part: {**made_by, **_write_store(part, store)},
            checkpoint,
        )
        stack.callback(coordinator.close)
        stack.enter_context(obeying_signals(coordinator))
        for each in {for_ranks.socket, for_clients.socket}:
            coordinator.listen(each)
        folder.write_state(
            JobState(*("starting", "", (for_clients.address,), os.getpid(), socket.gethostname()), asdict(placement))
        )
        words = ["--coordinator", _publish_address(for_ranks), "--store", _publish_address(for_store)]
        words += ["--interface", placement.interface]
        if checkpoint is not None:
            words += ["--checkpoint", str(checkpoint.number), "--open-files", settings.open_files.value]
        starters = _start_hosts(folder, hosts, bed, words)
        stack.callback(_end_hosts, starters)
        return _lead(coordinator, starters)


def _publish_address(entrance: Entrance) -> str:
    host, port = entrance.address
    return f"{host}:{port}"


def _start_hosts(
    folder: JobFolder, hosts: Sequence[Host], bed: testbed.Testbed | None, words: Sequence[str]
) -> dict[str, subprocess.Popen[bytes]]:
    """Start on each host the process that starts its ranks' keepers and ends after them; returns them by host."""
    for_all = [str(folder.path), "--hosts", describe_hosts(hosts), *words]
    started = {}
    for index, host in enumerate(hosts):
        command = [sys.executable, "-m", "remesh.carried.torch.host", str(index), *for_all]
        # A signal for us is for us alone: it must not end ranks that are to be saved.
        started[host.name] = subprocess.Popen(
            command_on(host, command, bed), stdin=subprocess.DEVNULL, start_new_session=True
        )
    return started


def _lead(coordinator: Coordinator, starters: Mapping[str, subprocess.Popen[bytes]]) -> JobOutcome:
    while coordinator.outcome is None:
        coordinator.step(_POLL_S)
        for host, starter in starters.items():
            if coordinator.outcome is None and starter.poll() not in (None, 0):
                # What its ranks sent last may still be on its way.
                coordinator.step(_POLL_S)
                coordinator.fail(
                    f"what keeps the ranks of host {host} ended with status {starter.returncode}; see what it printed"
                )
    until_s = time.monotonic() + _KEEPERS_GRACE_S
    while any(starter.poll() is None for starter in starters.values()) and time.monotonic() < until_s:
        coordinator.step(_POLL_S / 5)
    assert coordinator.outcome is not None
    return coordinator.outcome


def _end_hosts(starters: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """End the processes that have not ended by themselves; keepers on other hosts end when the leader is silent."""
    for starter in starters.values():
        if starter.poll() is None:
            os.killpg(starter.pid, signal.SIGKILL)
            starter.wait()


# --- what the leader adds to a checkpoint ---


def _write_store(part: Path, store: ProgramStore) -> dict[str, Any]:
    # All ranks are stopped, so what they sent each other to grow their groups after the last cut is needed no more.
    store.forget(GROWTH_PREFIX)
    data = json.dumps(store.content()).encode()
    try:
        write_new(part / _STORE_FILE, data)
    except OSError as error:
        raise StorageError(
            f"writing {part / _STORE_FILE}: {error.strerror}; check its free space and permissions"
        ) from error
    return {"store_sha256": hashlib.sha256(data).hexdigest()}


def _read_store(checkpoint: Checkpoint, spec: JobSpec) -> dict[str, str]:
    """The store's content at a checkpoint, whose torch and script must be the same as now."""
    for what, now in (("torch", _torch_version()), ("script", _digest_of_script(spec))):
        then = checkpoint.manifest.get(what, [])
        if then != [now]:
            raise ConfigError(
                f"restarting from checkpoint {checkpoint.number}: its {what} is {', '.join(then)}, found {now}; an "
                "image needs the versions that were loaded: restart with those, or start the program anew with `run`"
            )
    path = checkpoint.path / _STORE_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror}; choose another checkpoint") from error
    if hashlib.sha256(data).hexdigest() != checkpoint.manifest.get("store_sha256"):
        raise FormatError("bad-state", f"reading {path}: its digest does not match; choose another checkpoint")
    content: dict[str, str] = json.loads(data)
    return content


def _torch_version() -> str:
    """The version of the installed torch, found without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError as error:
        raise ConfigError("starting a torch.distributed program: torch is not installed beside Remesh") from error


def _digest_of_script(spec: JobSpec) -> str:
    """The SHA-256 of the script; for a module its name, since its file has not been looked up yet."""
    if spec.argv[0] == "-m":
        return f"-m {spec.argv[1]}"
    path = Path(spec.folder) / spec.argv[0]
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"looking at the script {path}: {error.strerror}; the script must be at the same path as before"
        ) from error
