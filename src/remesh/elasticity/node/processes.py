"""Worker processes of a node, each started, watched and killed by itself (torch elastic's process contexts)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, ProcessFailure, Std, start_processes
from torch.distributed.elastic.utils import macros

from remesh.foundation.settings import SLOT

END_GRACE_S = 5
"""How long a killed process may take to be gone."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The command, environment and folders that all workers of a node share."""

    command: tuple[str, ...]
    """Program and arguments; ``${local_rank}`` stands for the slot."""
    node_name: str
    environment: Mapping[str, str]
    log_folder: Path
    """Gets a folder for each start of a worker."""
    redirects: Std
    tee: Std
    keeps_logs: bool = True
    """Whether the folder of a start outlives its worker."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker process that has ended."""

    slot: int
    pid: int
    code: int
    """Negative: the number of the signal that killed it."""
    traceback: str
    """Where user code raised; empty when the worker left no error file."""


class WorkerProcesses:
    """The workers of one node, by slot. Not to be used from several threads."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._contexts: dict[int, PContext] = {}
        self._num_starts = 0
        self._places: dict[int, Path] = {}
        """Slot -> folder of its last start."""

    def start(self, slot: int) -> int:
        """Start a worker; its process id. Installs torch's own handlers of signals."""
        spec = self._spec
        self._num_starts += 1
        place = self._places[slot] = spec.log_folder / f"{spec.node_name}-worker{slot}-start{self._num_starts}"
        place.mkdir(parents=True, exist_ok=True)
        context = self._contexts[slot] = start_processes(
            name=f"{spec.node_name}/{slot}",
            entrypoint=spec.command[0],
            args={0: tuple(macros.substitute(list(spec.command[1:]), str(slot)))},
            envs={0: {**spec.environment, "LOCAL_RANK": str(slot), SLOT.name: str(slot)}},
            logs_specs=DefaultLogsSpecs(log_dir=str(place), redirects=spec.redirects, tee=spec.tee),
            log_line_prefixes={0: f"[{spec.node_name}/{slot}]: "},
        )
        return int(context.pids()[0])

    def poll(self) -> list[Exited]:
        """The workers that have ended since the last call."""
        found = []
        for slot, context in list(self._contexts.items()):
            pid = int(context.pids()[0])
            result = context.wait(0)
            if result is None:
                continue
            del self._contexts[slot]
            failure = result.failures.get(0)
            code = failure.exitcode if failure else 0
            if not self._spec.keeps_logs:
                shutil.rmtree(self._places.pop(slot), ignore_errors=True)
            found.append(Exited(slot, pid, code, "" if failure is None else _traceback_of(failure)))
        return found

    def kill(self, slot: int) -> None:
        """SIGKILL a worker and its children; nothing when it has ended."""
        context = self._contexts.get(slot)
        if context is not None:
            with contextlib.suppress(ProcessLookupError):
                # Workers lead sessions of their own, so this takes their children along.
                os.killpg(context.pids()[0], signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL all that still run, and wait until they are gone."""
        for slot, context in list(self._contexts.items()):
            self.kill(slot)
            context.wait(END_GRACE_S, period=0.01)


def _traceback_of(failure: ProcessFailure) -> str:
    """The traceback of the user's code, from the error file of the worker; it is shown once for the whole job."""
    message = failure.error_file_data.get("message", {})
    return str(message.get("extraInfo", {}).get("py_callstack", "")) if isinstance(message, dict) else ""
