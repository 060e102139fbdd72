"""Jobs of hosts under torchrun, killed from outside or by themselves, and what their checkpoints hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from remesh.foundation.linux.procfs import family_of, work_of
from remesh.testbed.quiet_limit import QuietLimit

_PATIENCE_S = 200
"""Time without any progress after which a job is given up."""
_TORCHRUN = ("torch.distributed.run",)
_VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def run_job(
    num_ranks: int,
    command: Sequence[str],
    folder: Path,
    *,
    variables: Mapping[str, str] | None = None,
    killed_when: Path | None = None,
) -> str:
    """What a job under torchrun said, run to its end, or killed with all its processes as soon as a file is there."""
    said = folder / "said.txt"
    with said.open("wb") as file:
        job = subprocess.Popen(
            _launch(num_ranks, command),
            cwd=folder,
            env={**os.environ, **_VARIABLES, **(variables or {})},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    limit = _patience_with([job])
    try:
        while job.poll() is None and not (killed_when is not None and killed_when.exists()):
            assert not limit.is_over(), said.read_text(errors="replace")[-3000:]
            time.sleep(0.02)
        code = job.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    text = said.read_text(errors="replace")
    expected = 0 if killed_when is None else None
    assert code == expected, f"the job ended with {code}, expected {expected}:\n{text[-5000:]}"
    return text


def run_script(script: Path, *arguments: object) -> tuple[int, str]:
    """How a script under torchrun on two CPU ranks ended, which may end itself, and what it said."""
    return run_ranks(2, (str(script), *map(str, arguments)), {"ACCELERATE_USE_CPU": "true"})


def run_ranks(
    num_ranks: int,
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    launcher: Sequence[str] = _TORCHRUN,
) -> tuple[int, str]:
    """How a script ended on so many ranks that torchrun, or another launcher of its kind, has started."""
    return run_program(_launch(num_ranks, command, launcher), variables)


def run_program(command: Sequence[str], variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """How a program ended, and what it and its children said. It has to get somewhere, however slow the machine is."""
    environment = {**os.environ, **_VARIABLES, **(variables or {})}
    with tempfile.TemporaryFile() as said:
        program = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
        try:
            wait_patiently([program])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        code = program.wait()
        said.seek(0)
        return code, said.read().decode(errors="replace")


def wait_patiently(programs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or neither they nor their children do anything any more."""
    limit = _patience_with(programs)
    while any(program.poll() is None for program in programs) and not limit.is_over():
        time.sleep(0.05)


def _patience_with(programs: Sequence[subprocess.Popen[bytes]]) -> QuietLimit:
    return QuietLimit(lambda: sum(map(work_of, family_of(*(each.pid for each in programs)))), _PATIENCE_S)


def _launch(num_ranks: int, command: Sequence[str], launcher: Sequence[str] = _TORCHRUN) -> tuple[str, ...]:
    return (sys.executable, "-m", *launcher, "--standalone", "--nproc-per-node", str(num_ranks), *command)


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, as native torch reads them."""
    found = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    entries = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(whole, checkpoint_id=directory, no_dist=True)
    return whole
