"""What a program's environment is."""

from __future__ import annotations

from remesh.rounds.job_folder import JobSpec
from remesh.torch_programs.environment import program_command, program_environment


def test_a_program_finds_what_torchrun_would_have_put_there() -> None:
    spec = JobSpec(("train.py", "--lr", "1"), 4, "/work", {"HOME": "/h"}, kind="torch")
    found = program_environment(spec, 3)
    assert found["HOME"] == "/h"
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("3", "3", "4", "1")
    assert program_command(spec, 3).argv[-3:] == ("train.py", "--lr", "1")


def test_what_the_user_chose_for_openmp_stays() -> None:
    spec = JobSpec(("train.py",), 2, "/work", {"OMP_NUM_THREADS": "8"}, kind="torch")
    assert program_environment(spec, 0)["OMP_NUM_THREADS"] == "8"
