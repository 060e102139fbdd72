"""Two halves in one process: a second program with its own C library is loaded, used by threads, and dropped whole."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from remesh.carried.mpi.in_place.halves import HERE as SOURCES, build_lower, build_upper, compile_program

HERE = Path(__file__).parent
TIMEOUT_S = 120
pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on PATH"),
]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program, and its lower half."""
    folder = tmp_path_factory.mktemp("halves")
    lower = build_lower(folder / "lower_plain", HERE / "lower_plain.c")
    return build_upper(folder / "upper_plain", HERE / "upper_plain.c"), lower


def run(halves: tuple[Path, Path], way: str) -> subprocess.CompletedProcess[str]:
    """The program in one of its ways."""
    command = [*map(str, halves), way]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("nothing_is_left", "nothing"),
        ("nothing_gets_by", "nothing"),
        ("two_libraries", "two"),
        ("under_load", "loaded"),
        ("children", "children"),
        ("handlers_are_as_asked", "handlers"),
    ],
)
def test_halves_of_one_process_keep_to_themselves(halves: tuple[Path, Path], way: str, said: str) -> None:
    done = run(halves, way)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\n", "")


def test_threads_borrow_in_turn_while_a_timer_interrupts_them(halves: tuple[Path, Path]) -> None:
    done = run(halves, "many_threads")
    assert (done.returncode, done.stderr) == (0, "")
    # 3,200 threads, at most nine at a time; one more thread makes places.
    assert int(done.stdout.split()[0]) <= 10


def test_a_crash_is_told_as_that_of_the_half_that_it_is_of(halves: tuple[Path, Path]) -> None:
    inside, outside = run(halves, "crash_inside"), run(halves, "crash_outside")
    assert inside.returncode == outside.returncode == -11
    assert inside.stderr.startswith("remesh: signal 11 inside the MPI library, at lower_plain+0x")
    assert inside.stderr.endswith(", in MPI_Of_test\n")
    assert outside.stderr == ""


def test_what_cannot_be_is_refused_by_name(halves: tuple[Path, Path], tmp_path: Path) -> None:
    taken = run(halves, "addresses_taken")
    assert (taken.returncode, taken.stdout) == (2, "")
    assert taken.stderr == "addresses 0x200000000000 to 0x240000000000 are not free in this process, or take no code\n"
    absent = run((halves[0], tmp_path / "absent"), "load")
    assert absent.returncode == 2
    assert "absent: cannot open shared object file" in absent.stderr
    assert absent.stderr.endswith("absent ended with status 127 before it was there; what it said stands above\n")


def test_calls_are_rewritten_in_every_form_and_nothing_else_is(tmp_path: Path) -> None:
    sources = (HERE / "sites_forms.c", SOURCES / "sites.c", SOURCES / "serve.S")
    program = compile_program(tmp_path / "forms", *sources)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "11 forms\n")
