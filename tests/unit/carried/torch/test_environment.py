"""What a program's environment is."""

from __future__ import annotations

from remesh.carried.hosts.host_list import assign_slots, parse_hosts
from remesh.carried.rounds.job_folder import JobSpec
from remesh.carried.torch.environment import program_command, program_environment
from remesh.wire.token import Token

_SEATS = assign_slots(parse_hosts("a:1,b:1,c:2", 4))
_TOKEN = Token("", b"0123456789abcdef")


def test_a_program_finds_what_torchrun_would_have_put_there() -> None:
    spec = JobSpec(("train.py", "--lr", "1"), 4, "/work", {"HOME": "/h"}, kind="torch")
    found = program_environment(spec, _SEATS[3])
    assert found["HOME"] == "/h"
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("3", "1", "4", "1")
    assert (found["LOCAL_WORLD_SIZE"], found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("2", "2", "3")
    assert (found["MASTER_ADDR"], found["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "none")
    assert program_command(spec, _SEATS[3], _TOKEN).argv[-3:] == ("train.py", "--lr", "1")


def test_ranks_have_process_ids_of_their_own_which_programs_name_files_by_and_draw_from() -> None:
    spec = JobSpec(("train.py",), 4, "/work", {}, kind="torch")
    assert len({program_command(spec, slot, _TOKEN).pid for slot in _SEATS}) == 4


def test_what_the_user_chose_for_openmp_stays() -> None:
    spec = JobSpec(("train.py",), 2, "/work", {"OMP_NUM_THREADS": "8"}, kind="torch")
    assert program_environment(spec, _SEATS[0])["OMP_NUM_THREADS"] == "8"
