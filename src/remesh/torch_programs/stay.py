"""How does a job of torch.distributed stay on this host, from its start to its end? `run_stay`, called by its leader.

store ── coordinator ── a keeper for each rank ── the coordinator's steps until an outcome ── tidy up
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from remesh.errors import ConfigError, FormatError, StorageError
from remesh.files import write_new
from remesh.images.kinds import OpenFilePolicy
from remesh.rounds.job_folder import Checkpoint, JobFolder, JobSpec, JobState
from remesh.rounds.leader import Coordinator, JobOutcome, Settings
from remesh.rounds.signals import obeying_signals
from remesh.torch_programs.notice import GROWTH_PREFIX
from remesh.torch_programs.store_server import ProgramStore

KIND: Final = "torch"
"""Of jobs: the verb that they belong to."""
_STORE_FILE: Final = "store.json"
_STEP_S: Final = 0.05
_LEAVE_S: Final = 15.0
"""After the outcome keepers have this long to end by themselves."""
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TorchSettings(Settings):
    """How a job takes its checkpoints, and where its ranks speak."""

    interface: str = ""
    """For gloo; "" leaves it to the program's environment."""
    open_files: OpenFilePolicy = OpenFilePolicy.TRUNCATE
    """At a restart: of files that the program had open for writing."""


def run_stay(
    folder: JobFolder, settings: TorchSettings, checkpoint: Checkpoint | None, say: Callable[[str], None]
) -> JobOutcome:
    """Run the job here, from its beginning or from a checkpoint, until it ends or stops.

    SIGTERM takes a checkpoint and stops; SIGINT ends the job. Both only when called in the main thread.
    """
    spec = folder.read_spec()
    content = {} if checkpoint is None else _read_store(checkpoint, spec)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.lead())
        listeners = [socket.create_server((_LOOPBACK, 0), backlog=1024) for _ in range(2)]
        store = stack.enter_context(ProgramStore(folder.read_token(), listeners[0], content, folder.log_event))
        made_by = {"torch": [_torch_version()], "script": [_digest_of_script(spec)]}
        coordinator = Coordinator(
            folder, spec.num_ranks, settings, say, lambda part: {**made_by, **_write_store(part, store.content())}
        )
        stack.callback(coordinator.close)
        stack.enter_context(obeying_signals(coordinator))
        coordinator.listen(listeners[1])
        addresses = [listener.getsockname()[:2] for listener in listeners]
        folder.write_state(
            JobState(
                "starting", "", (addresses[1],), os.getpid(), socket.gethostname(), {"interface": settings.interface}
            )
        )
        keepers = _start_keepers(folder, spec, settings, checkpoint, addresses)
        stack.callback(_end_keepers, keepers)
        return _lead(coordinator, keepers)


def _start_keepers(
    folder: JobFolder,
    spec: JobSpec,
    settings: TorchSettings,
    checkpoint: Checkpoint | None,
    addresses: Sequence[tuple[str, int]],
) -> list[subprocess.Popen[bytes]]:
    store, coordinator = (f"{host}:{port}" for host, port in addresses)
    command = [sys.executable, "-m", "remesh.torch_programs.keeper", str(folder.path)]
    command += ["--coordinator", coordinator, "--store", store, "--interface", settings.interface]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint.number), "--open-files", settings.open_files.value]
    return [
        # A signal for us is for us alone: it must not end ranks that are to be saved.
        subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.DEVNULL, start_new_session=True)
        for rank in range(spec.num_ranks)
    ]


def _lead(coordinator: Coordinator, keepers: Sequence[subprocess.Popen[bytes]]) -> JobOutcome:
    while coordinator.outcome is None:
        coordinator.step(_STEP_S)
        for rank, keeper in enumerate(keepers):
            if coordinator.outcome is None and keeper.poll() not in (None, 0):
                # What it said last may still be on its way.
                coordinator.step(_STEP_S)
                coordinator.fail(
                    f"the keeper of rank {rank} ended with status {keeper.returncode}; see what it printed"
                )
    until_s = time.monotonic() + _LEAVE_S
    while any(keeper.poll() is None for keeper in keepers) and time.monotonic() < until_s:
        coordinator.step(_STEP_S / 5)
    assert coordinator.outcome is not None
    return coordinator.outcome


def _end_keepers(keepers: Sequence[subprocess.Popen[bytes]]) -> None:
    for keeper in keepers:
        if keeper.poll() is None:
            keeper.send_signal(signal.SIGKILL)
        keeper.wait()


# --- what the leader adds to a checkpoint ---


def _write_store(part: Path, content: Mapping[str, str]) -> dict[str, Any]:
    kept = {key: value for key, value in content.items() if not key.startswith(GROWTH_PREFIX)}
    data = json.dumps(kept).encode()
    try:
        write_new(part / _STORE_FILE, data)
    except OSError as error:
        raise StorageError(f"writing {part / _STORE_FILE}: {error.strerror}; see its space and rights") from error
    return {"store_sha256": hashlib.sha256(data).hexdigest()}


def _read_store(checkpoint: Checkpoint, spec: JobSpec) -> dict[str, str]:
    """The store's content at a checkpoint, whose torch and script must be those of now."""
    for what, now in (("torch", _torch_version()), ("script", _digest_of_script(spec))):
        then = checkpoint.manifest.get(what, [])
        if then != [now]:
            raise ConfigError(
                f"restarting from checkpoint {checkpoint.number}: its {what} is {', '.join(then)}, found {now}; an "
                "image goes on with what was loaded: restart with what there was, or start the program anew with `run`"
            )
    path = checkpoint.path / _STORE_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror}; choose another checkpoint") from error
    if hashlib.sha256(data).hexdigest() != checkpoint.manifest.get("store_sha256"):
        raise FormatError("bad-state", f"reading {path}: its digest does not fit; choose another checkpoint")
    content: dict[str, str] = json.loads(data)
    return content


def _torch_version() -> str:
    """Without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError as error:
        raise ConfigError("starting a torch.distributed program: torch is not installed beside Remesh") from error


def _digest_of_script(spec: JobSpec) -> str:
    """SHA-256 of the script; the name of a module, which nobody has found yet."""
    if spec.argv[0] == "-m":
        return f"-m {spec.argv[1]}"
    path = Path(spec.folder) / spec.argv[0]
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"looking at the script {path}: {error.strerror}; it is to stand where it did") from error
