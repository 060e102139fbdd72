"""The script for Slurm is one that a shell can read, with every name quoted, and tells a checkpoint from an attempt."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from remesh.carried.hosts.slurm import BatchLaunch, make_script

_MPI = BatchLaunch("mpi", ("-n", "4"), ("--mpi", "mpich"))
_KINDS = [_MPI, BatchLaunch("torch"), BatchLaunch("torch", options=("--interface", "ib 0"))]
_NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, which is not on the path")


def test_names_with_spaces_stay_whole() -> None:
    script = make_script(4, _MPI, "/scratch/my job", ["app.py", "a b"])
    assert "remesh mpi run -n 4 --mpi mpich --hosts \"$hosts\" --job '/scratch/my job' app.py 'a b' &" in script
    assert "remesh mpi restart '/scratch/my job' --mpi mpich --hosts \"$hosts\" &" in script


@_NEEDS_BASH
@pytest.mark.procs
@pytest.mark.parametrize("launch", _KINDS)
def test_a_shell_can_read_it(launch: BatchLaunch) -> None:
    script = make_script(4, launch, "/scratch/my job", ["app.py", "it's"])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)


@_NEEDS_BASH
@pytest.mark.procs
@pytest.mark.parametrize("launch", _KINDS)
@pytest.mark.parametrize(
    ("left", "said"),
    [
        ((), "run"),
        (("images/000003",), "restart"),
        (("images/000001.part",), "run"),  # it was killed while it wrote its first checkpoint
        (("images",), "run"),
    ],
)
def test_it_goes_on_from_a_checkpoint_and_starts_anew_without_one(
    tmp_path: Path, launch: BatchLaunch, left: tuple[str, ...], said: str
) -> None:
    job, tools = tmp_path / "my job", tmp_path / "tools"
    for name in left:
        (job / name).mkdir(parents=True)
    tools.mkdir()
    for name, text in {"srun": "echo b; echo a; echo b", "remesh": 'printf "%s|" "$@"; mkdir -p "$JOB"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o700)
    done = subprocess.run(
        ["bash", "-s"],
        input=make_script(3, launch, str(job), ["app.py", "it's"]),
        env={"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "JOB": str(job)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    words = done.stdout.split("|")
    assert words[:2] == [launch.verb, said], done
    assert words[words.index("--hosts") + 1] == "a:1,b:2"
    for option in launch.options:
        assert option in words
    if said == "run":
        assert words[-4:-1] == [str(job), "app.py", "it's"]
        assert Path(f"{job}.failed.7").exists() == bool(left)
