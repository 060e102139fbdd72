"""Programs in C, compiled against each MPI's own header, on the library that stands for all of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from remesh.carried.mpi.library.build import LIBRARIES
from remesh.carried.mpi.mpis import find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.foundation.errors import ConfigError
from tests.mpi.conftest import PROGRAMS, Job, stop_after

pytestmark = pytest.mark.mpi


_ROTATED = (("mpich", "openmpi", "impi"), ("openmpi", "impi", "mpich"), ("impi", "mpich", "openmpi"))


def compiled(name: str, face: str, into: Path) -> Path:
    """A program of ours, linked with the MPI of a face."""
    try:
        place = Path(find_mpi("openmpi" if face == "openmpi" else "mpich").launcher).parents[1]
    except ConfigError as error:
        pytest.skip(str(error))
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    source, program = PROGRAMS / "c" / f"{name}.c", into / f"{name}-{face}"
    include = place / "include"
    if face == "abi":
        include = into / "include"
        include.mkdir(exist_ok=True)
        (include / "mpi.h").symlink_to(place / "include" / "mpi_abi.h")
    command = ["cc", "-O1", "-Wall", "-Werror", "-I", str(include), str(source), "-o", str(program)]
    library = (f"-L{place / 'lib'}", f"-l:{LIBRARIES[face]}", "-lm")
    done = subprocess.run([*command, *library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def _create(job: Job, path: Path, program: Path, num_ranks: int, *arguments: object) -> None:
    argv, environment = (str(program), *map(str, arguments)), {"PATH": "/usr/bin:/bin", **job.gated}
    job.folder = JobFolder.create(path / "job", JobSpec(argv, num_ranks, str(path), environment))


@pytest.mark.parametrize("program", ["collectives", "groups", "windows", "communicators"])
@pytest.mark.parametrize("face", LIBRARIES)
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_what_comes_is_what_each_rank_can_work_out(
    job: Job, tmp_path: Path, program: str, face: str, num_ranks: int
) -> None:
    _create(job, tmp_path, compiled(program, face, tmp_path), num_ranks, 1)
    assert job.stay("mpich").outcome.state == "finished", job.events
    assert job.answer is not None


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("collectives", 60), ("groups", 150))),
        ("windows", 60),
    ],
)
def test_collectives_are_carried_through_three_mpis(job: Job, tmp_path: Path, name: str, rounds: int) -> None:
    program = compiled(name, "mpich", tmp_path)
    answers = []
    for folder, chain in (("plain", ()), ("chain", ("mpich", "openmpi", "impi"))):
        (tmp_path / folder).mkdir()
        _create(job, tmp_path / folder, program, 4, rounds)
        checkpoint = None
        for mpi in chain:
            stopped = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(0.3))
            assert stopped.outcome.state == "stopped", job.events
            checkpoint = job.folder.checkpoint(None)
        assert job.stay("openmpi", checkpoint=checkpoint).outcome.state == "finished", job.events
        answers.append(job.answer)
    assert answers[0] is not None and answers[0] == answers[1]


_STAND_IN = (
    *("barrier", "allreduce", "long", "in_place", "started", "own", "bcast_short", "bcast_long", "allgatherv"),
    *("alltoallv", "split", "fence", "write_all", "finalize"),
)
_IN_CI = ("allreduce", "split", "fence", "write_all", "finalize")
"""One of each kind of object that ranks may stand in."""


@pytest.mark.parametrize("arena", ["", "1"], ids=["own memory", "shared memory"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in _IN_CI else kind for kind in _STAND_IN]
)
def test_a_cut_waits_for_nobody_who_computes_while_others_stand_in_a_collective(
    tmp_path: Path, kind: str, arena: str
) -> None:
    program, sign = compiled("absent", "mpich", tmp_path), tmp_path / "come"
    job = Job(tmp_path / "job")
    variables = {"REMESH_SHARED_ARRAYS": arena} if arena else {}
    job.create(program, kind, sign, num_ranks=3, **variables)
    first, second, third = _ROTATED[_STAND_IN.index(kind) % 3]
    stopped = job.stay(first, watch=stop_after(0.5))
    assert stopped.outcome.state == "stopped", job.events
    # Once more while they still stand in what has been begun anew.
    stopped = job.stay(second, checkpoint=job.folder.checkpoint(None), watch=stop_after(0.5))
    assert stopped.outcome.state == "stopped", job.events
    sign.touch()
    ended = job.stay(third, checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == ("answer 0" if kind == "finalize" else "answer 3")


@pytest.mark.slow
def test_a_thread_that_calls_mpi_while_it_ends_has_a_way_of_its_own(job: Job, tmp_path: Path) -> None:
    _create(job, tmp_path, compiled("ended_threads", "mpich", tmp_path), 1)
    assert job.stay("mpich").outcome.state == "finished", job.events
    assert job.answer == "answer 1 2"


@pytest.mark.slow
def test_more_threads_than_ways_wait_in_mpi_and_are_carried(job: Job, tmp_path: Path) -> None:
    rounds, num_threads = 20, 40
    _create(job, tmp_path, compiled("threads", "mpich", tmp_path), 2, rounds)
    stopped = job.stay("mpich", watch=stop_after(0.3))
    assert stopped.outcome.state == "stopped", job.events
    assert job.stay("openmpi", checkpoint=job.folder.checkpoint(None)).outcome.state == "finished", job.events
    expected = sum(1000 * i + tag for i in range(rounds) for tag in range(num_threads))
    assert job.answer == f"answer {expected}"


_GONE_THROUGH = ("bcast", "scatter", "scatterv", "gather", "reduce", "scan", "exscan")


@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("kind", _GONE_THROUGH)
def test_a_cut_waits_for_nobody_who_computes_while_others_have_gone_through_collectives(
    job: Job, tmp_path: Path, kind: str, length: str
) -> None:
    program, sign, ahead = compiled("ahead", "mpich", tmp_path), tmp_path / "come", tmp_path / "ahead"
    _create(job, tmp_path, program, 3, kind, length, sign, ahead)
    first, second, third = _ROTATED[_GONE_THROUGH.index(kind) % 3]
    stopped = job.stay(first, watch=stop_after(0.5))
    assert stopped.outcome.state == "stopped", job.events
    assert ahead.exists() == (length == "short" and kind != "scatterv"), "short ones need nobody"
    stopped = job.stay(second, checkpoint=job.folder.checkpoint(None), watch=stop_after(0.5))
    assert stopped.outcome.state == "stopped", job.events
    sign.touch()
    ended = job.stay(third, checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == "answer 20"
