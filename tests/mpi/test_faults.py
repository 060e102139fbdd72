"""A program in C that does what no program may do is told so by name, and nobody hangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from remesh.carried.rounds import leader
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.conftest import Job
from tests.mpi.test_library import compiled

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def _run(job: Job, path: Path, *argv: object) -> str:
    """The state in which the job ends."""
    words = tuple(map(str, argv))
    job.folder = JobFolder.create(path / "job", JobSpec(words, 2, str(path), {"PATH": "/usr/bin:/bin"}))
    return job.stay("mpich").outcome.state


def _errors(job: Job) -> str:
    said = [log.read_text() for log in sorted(job.folder.logs.glob("rank-*.err"))]
    return job.folder.read_state().cause + "".join(said)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("begin", "MPI_Barrier: .*called before MPI_Init"),
        ("end", "MPI_Barrier: .*called after MPI_Finalize"),
        ("handler", "in a signal handler that has come in the middle of another call of MPI"),
        ("spawn", "MPI_Comm_spawn: .*does not carry MPI_Comm_spawn; docs/mpi/limits.md lists what"),
        ("faces", "another MPI library has started in this process; link .* with one MPI"),
        ("bounds", "its channel is damaged.*look for what in the program writes out of bounds"),
        ("leave", "rank 1 on host .* ended with exit status 0 without MPI_Finalize"),
        ("again", "rank 1 on host .* ended with exit status 0 without MPI_Finalize"),
        ("message", "rank 0 on host .*: the program ended while another rank was to receive a message from its memory"),
        ("dying", "the program of rank 0 on host .* was killed by signal 11"),
        ("crash", "the program of rank 1 on host .* was killed by signal 11"),
        ("abort", "rank 1 on host .*: the program called Abort with 23"),
    ],
)
def test_it_ends_its_job_and_says_why(
    job: Job, tmp_path: Path, kind: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_OTHERS_TIMEOUT_S", 1.0)
    assert _run(job, tmp_path, compiled("faults", "mpich", tmp_path), kind) == "failed"
    assert re.search(told, _errors(job)), _errors(job)


def test_a_program_of_sessions_ends_mpi_with_its_last_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_OTHERS_TIMEOUT_S", 1.0)
    assert _run(job, tmp_path, compiled("faults", "mpich", tmp_path), "session") == "finished", job.events


def test_mpi_ends_when_messages_whose_requests_were_freed_have_been_received(job: Job, tmp_path: Path) -> None:
    assert _run(job, tmp_path, compiled("faults", "mpich", tmp_path), "free") == "finished", job.events
    assert job.answer == "answer 1"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("child", "in a process that the program has forked: only the program itself may use MPI"),
        ("program", "not for those that this starts"),
    ],
)
def test_a_child_that_uses_mpi_ends_and_its_parent_goes_on(job: Job, tmp_path: Path, kind: str, told: str) -> None:
    assert _run(job, tmp_path, compiled("faults", "mpich", tmp_path), kind) == "finished", job.events
    assert told in _errors(job)
    assert job.answer == "answer 1"
    assert "child 1" in (job.folder.logs / "rank-0000.out").read_text()


def test_a_script_that_does_not_end_with_exec_is_told_to(job: Job, tmp_path: Path) -> None:
    program = compiled("faults", "mpich", tmp_path)
    script = tmp_path / "script.sh"
    script.write_text(f"#!/bin/sh\n{program}\nexit $?\n")
    script.chmod(0o755)
    assert _run(job, tmp_path, script) == "failed"
    assert "let a script end with `exec` and the program" in _errors(job)


def test_ranks_that_wait_for_one_that_was_refused_do_not_hang(job: Job) -> None:
    """mpi4py makes an exception of the refusal, and so its program ends without having sent what others wait for."""
    job.create("refused", num_ranks=2)
    assert job.stay("openmpi").outcome.state == "failed"
    assert "Remesh does not carry MPI_Open_port; docs/mpi/limits.md" in _errors(job)
