"""Checkpoints both ways with Megatron Core: what one package has saved the other loads, to the bit.

`make interop` installs the releases, without their dependencies, each into a folder of its own, and runs this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("checkpoint_rank.py")
_PATIENCE_S = 240
_RELEASES = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")

_CANNOT_SAVE = ("0.12.3",)
"""With this release of torch."""

pytestmark = pytest.mark.long


@pytest.fixture(params=_RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release that is installed."""
    name = str(request.param)
    if not (_ROOT / ".interop" / name / "megatron").is_dir():
        pytest.skip(f"needs megatron-core {name}, which `make interop` installs")
    return name


def run_job(release: str, package: str, action: str, directory: Path, num_ranks: int) -> None:
    """Run all ranks of a job; the output of a failed one is in the error."""
    paths = [str(_ROOT / ".interop" / release), str(_ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            with said_by(directory, action, rank).open("wb") as said:
                arguments = [package, action, str(directory), str(rank), str(num_ranks)]
                command = [sys.executable, str(_SCRIPT), *arguments]
                ranks.append(
                    subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
                )
        for number, one in enumerate(ranks):
            code = one.wait(timeout=_PATIENCE_S)
            text = said_by(directory, action, number).read_text(errors="replace")
            assert code == 0, f"rank {number} of {package} {action} with {release}: {text[-3000:]}"
    finally:
        for one in ranks:  # and what it has started, which may go on without it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def said_by(directory: Path, action: str, rank: int) -> Path:
    """Where the output of a rank goes."""
    return directory.with_name(f"{directory.name}-{action}-{rank}.txt")


def check_can_save(release: str, saver: str) -> None:
    """Skip where the saver does not run with today's torch."""
    if saver == "megatron" and release in _CANNOT_SAVE:
        pytest.skip(f"megatron-core {release} cannot save with torch {torch.__version__}")


@pytest.mark.parametrize(("saver", "loader"), [("remesh", "megatron"), ("megatron", "remesh")])
def test_what_one_has_saved_the_other_loads(release: str, saver: str, loader: str, tmp_path: Path) -> None:
    check_can_save(release, saver)
    run_job(release, saver, "save", tmp_path / "checkpoint", 2)
    run_job(release, loader, "load", tmp_path / "checkpoint", 2)


@pytest.mark.parametrize(("saver", "loader"), [("remesh", "megatron"), ("megatron", "remesh")])
def test_flattened_slices_go_both_ways(release: str, saver: str, loader: str, tmp_path: Path) -> None:
    if release >= "0.16":
        pytest.skip(f"megatron-core {release} has no flattened slices any more")
    check_can_save(release, saver)
    run_job(release, saver, "save-flat", tmp_path / "checkpoint", 4)
    run_job(release, loader, "load-flat", tmp_path / "checkpoint", 4)


def test_zarr_is_read_by_a_release_that_still_can(release: str, tmp_path: Path) -> None:
    if release >= "0.16":
        pytest.skip(f"megatron-core {release} has no zarr any more")
    if release < "0.13":
        pytest.skip(f"megatron-core {release} reads zarr with a package that is not installed here")
    run_job(release, "remesh", "save-zarr", tmp_path / "checkpoint", 2)
    run_job(release, "megatron", "load-zarr", tmp_path / "checkpoint", 2)
