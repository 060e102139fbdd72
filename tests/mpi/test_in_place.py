"""The real MPI in the program's own process: it comes from a seat, is taken away, and comes back as another MPI."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from remesh.carried.mpi.in_place.halves import build_lower_mpi, build_seat, build_upper
from remesh.carried.mpi.launch import ROWS, Reach, plan_start
from remesh.carried.mpi.mpis import find_mpi
from remesh.foundation.errors import ConfigError

HERE = Path(__file__).parents[1] / "procs" / "carried" / "mpi" / "in_place"
FACES = {"mpich": "mpich", "openmpi": "openmpi", "impi": "mpich"}
TIMEOUT_S = 120
GRACE_S = 30
NUM_RANKS = 2
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on PATH")]


@dataclass(frozen=True)
class Programs:
    """What was compiled."""

    upper: Path
    seat: Path
    lower: dict[str, Path]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The program, the seat, and the lower half of each face."""
    folder = tmp_path_factory.mktemp("in_place")
    lower = {face: build_lower_mpi(face, folder / face) for face in dict.fromkeys(FACES.values())}
    return Programs(build_upper(folder / "upper_mpi", HERE / "upper_mpi.c"), build_seat(folder / "seat"), lower)


@dataclass(frozen=True)
class Ended:
    """How a rank's program ended."""

    status: int
    said: str
    told: str


def stays(programs: Programs, folder: Path, places: Sequence[tuple[str, str]], **variables: str) -> list[Ended]:
    """One program for each rank, which goes through MPIs and networks; how they ended."""
    arguments, commands = [], []
    for number, (mpi, network) in enumerate(places):
        try:
            installation = find_mpi(mpi)
        except ConfigError as error:
            pytest.skip(str(error))
        seats = folder / str(number)
        seats.mkdir()
        library = Path(installation.launcher).parents[1] / "lib"
        arguments += [str(seats), str(programs.lower[FACES[mpi]]), str(library)]
        commands.append(plan_start(installation, network, NUM_RANKS, (), Reach(), [str(programs.seat), str(seats)]))
    with contextlib.ExitStack() as ends:
        ranks = []
        for rank in range(NUM_RANKS):
            out, told = (ends.enter_context((folder / f"{rank}.{name}").open("w+")) for name in ("out", "err"))
            command = [str(programs.upper), str(rank), *arguments]
            ranks.append(subprocess.Popen(command, stdout=out, stderr=told, env={**os.environ, **variables}))
            ends.callback(_end, ranks[-1])
        for one in commands:
            environment = {**os.environ, **one.environment}
            done = subprocess.run(
                one.command, env=environment, stdin=subprocess.DEVNULL, check=False, timeout=TIMEOUT_S
            )
            if done.returncode != 0:
                break  # the programs are dead, or wait for the next one
        else:
            for program in ranks:
                program.wait(TIMEOUT_S)
    words = [[(folder / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(NUM_RANKS)]
    return [Ended(program.returncode, *said) for program, said in zip(ranks, words, strict=True)]


def _end(program: subprocess.Popen[bytes]) -> None:
    """A program that was killed has ended by itself within a moment; another one is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_S)
    program.kill()
    program.wait()


def expected_sums(num_stays: int) -> list[list[int]]:
    """What ``upper_mpi.c`` computes with its messages, for each stay and rank."""
    whole = (1 << 64) - 1
    sums, found = [7 + 1000 * rank for rank in range(NUM_RANKS)], []
    for _ in range(num_stays):
        for i in range(200):  # the ring, and a sum of all
            sums = [(own * 31 + other + i) & whole for own, other in zip(sums, reversed(sums), strict=True)]
            folded = sum(own % 1000003 for own in sums)
            sums = [(own + folded) & whole for own in sums]
        factors = [own | 1 for own in reversed(sums)]
        for i in range(0, 3 << 20, 4096):  # what the peer has sent
            got = [(((i * factor) & whole) >> 8) & 0xFF for factor in factors]
            sums = [(own * 31 + byte) & whole for own, byte in zip(sums, got, strict=True)]
        sums = [
            (own * 31 + other) & whole for own, other in zip(sums, reversed(sums), strict=True)
        ]  # after stepping out
        for tag in [10, 11] * 3:  # threads
            own = tag
            for i in range(20):
                own = (own * 34 + i) & whole
            sums = [(each * 31 + own) & whole for each in sums]
        found.append(sums)
    return found


def test_one_process_goes_through_all_mpis_and_networks(programs: Programs, tmp_path: Path) -> None:
    places = [(row.mpi, row.network) for row in ROWS if row.one_host is not None]
    # Under the audit of the kernel, which ends the process at the first call of a lower half that is not known.
    ended = stays(programs, tmp_path, places, AUDIT="1")
    for rank, one in enumerate(ended):
        assert (one.status, one.told) == (0, ""), one.said
        sums = [int(each, 16) for each in re.findall(r"sum (\w+)", one.said)]
        assert sums == [each[rank] for each in expected_sums(len(places))]


def test_a_crash_inside_mpi_is_told_and_ends_the_job(programs: Programs, tmp_path: Path) -> None:
    other, crashed = stays(programs, tmp_path, [("mpich", "shm")], CRASH="1")
    assert crashed.status == -11
    assert re.fullmatch(r"remesh: signal 11 inside the MPI library, at \S+\+0x\w+, in MPI_Send\n", crashed.told)
    # mpiexec ends the other rank's seat, and that its program.
    assert other.status == -9
