"""How commands get to hosts, and what a host says that does not see its job."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from remesh.carried.hosts.host_list import Host
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.torch import host
from remesh.carried.torch.reach import command_on

_COMMAND = ("python", "-m", "it", "a b")


@pytest.mark.parametrize("name", ["127.0.0.2", "localhost", socket.gethostname()])
@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "3"}])
def test_on_this_host_a_command_is_started_as_it_is(name: str, environ: dict[str, str]) -> None:
    assert command_on(Host(name, 1), _COMMAND, None, environ) == list(_COMMAND)


def test_on_another_host_it_is_one_word_for_a_shell() -> None:
    *words, last = command_on(Host("node-7", 2), _COMMAND, None, {})
    assert words == ["ssh", "node-7"]
    assert last.startswith("env PYTHONPATH=") and last.endswith("python -m it 'a b'")


def test_inside_an_allocation_slurm_starts_it() -> None:
    words = command_on(Host("node-7", 2), _COMMAND, None, {"SLURM_JOB_ID": "3"})
    assert words[0] == "srun" and "--nodelist=node-7" in words
    assert words[-4:] == list(_COMMAND)


def test_a_host_that_does_not_see_the_job_or_its_images_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job"
    words = ["1", str(job), "--hosts", "a:1,b:1", "--checkpoint", "3", "--store", "h:1"]
    assert host.main(words) == 1
    assert f"starting ranks on host b: there is no {job / 'job.json'} on it" in capsys.readouterr().err
    JobFolder.create(job, JobSpec(("train.py",), 2, "/", {}))
    assert host.main(words) == 1
    said = capsys.readouterr().err
    assert str(job / "images" / "000003") in said and "file system that all its hosts share" in said
