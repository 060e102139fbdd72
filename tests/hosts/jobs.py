"""Jobs of hosts under torchrun, killed from outside or by themselves, and what their checkpoints hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_PATIENCE_S = 500
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
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while job.poll() is None and not (killed_when is not None and killed_when.exists()):
            assert time.monotonic() < deadline, said.read_text(errors="replace")[-3000:]
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


def run_script(script: Path, *arguments: object, timeout_s: int = 180) -> tuple[int, str]:
    """How a script under torchrun on two CPU ranks ended, which may end itself, and what it said."""
    done = subprocess.run(
        _launch(2, (str(script), *map(str, arguments))),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **_VARIABLES, "ACCELERATE_USE_CPU": "true"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _launch(num_ranks: int, command: Sequence[str]) -> tuple[str, ...]:
    flags = ("--standalone", "--nproc-per-node", str(num_ranks))
    return (sys.executable, "-m", "torch.distributed.run", *flags, *command)


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, as native torch reads them."""
    found = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    entries = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(whole, checkpoint_id=directory, no_dist=True)
    return whole
