"""mpi4py on the library gives what it gives on a real MPI, also when its lower half is renewed all the time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remesh
from remesh.carried.mpi.mpis import KINDS, Installation, find_mpi
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import WIRE_DIRECT, WIRE_PROBES
from tests.mpi.patience import run_patiently

pytestmark = pytest.mark.mpi
_HERE = Path(__file__).parent
_ALONE = str(_HERE / "lower_alone.py")
_PROGRAM = str(_HERE / "programs" / "every_call.py")
_WINDOWS = str(_HERE / "programs" / "windows.py")
_FLAGS = {
    "openmpi": ["--bind-to", "none", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,sm"],
    "mpich": [],
    "impi": ["-genv", "I_MPI_PIN", "0", "-genv", "I_MPI_FABRICS", "shm"],
}
_AS_ROOT = {f"{program}_ALLOW_RUN_AS_ROOT{suffix}": "1" for program in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}


def _installed(kind: str) -> Installation:
    try:
        return find_mpi(kind)
    except ConfigError as error:
        pytest.skip(str(error))


def _run(kind: str, num_ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    mpi = _installed(kind)
    source = str(Path(remesh.__file__).parents[1])
    environment = os.environ | _AS_ROOT | {"PYTHONPATH": source} | variables
    launch = [mpi.launcher, *_FLAGS[kind], "-n", str(num_ranks), mpi.python, *command]
    done = run_patiently(launch, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _seen(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"rank \d+ saw \d+", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_sees_the_same_as_under_mpi4py(kind: str) -> None:
    native = _seen(_run(kind, 4, _PROGRAM, "60"))
    assert len(native) == 4
    assert _seen(_run(kind, 4, _ALONE, _PROGRAM, "60")) == native


@pytest.mark.slow
def test_a_program_does_not_notice_that_its_lower_half_is_renewed() -> None:
    native = _seen(_run("openmpi", 4, _PROGRAM, "150"))
    renewed = _run("openmpi", 4, _ALONE, "--renew", "0.02", _PROGRAM, "150")
    assert _seen(renewed) == native
    found = re.search(r"renewed (\d+) times", renewed.stderr)
    assert found is not None and int(found[1]) > 0


@pytest.mark.parametrize(
    "variables",
    [{WIRE_PROBES.name: "1"}, {WIRE_DIRECT.name: "1"}],
    ids=["probing", "reading-neighbours"],
)
def test_a_program_sees_the_same_on_every_path_of_the_lower_half(variables: dict[str, str]) -> None:
    native = _seen(_run("openmpi", 4, _PROGRAM, "60"))
    renewed = _run("openmpi", 4, _ALONE, "--renew", "0.05", _PROGRAM, "60", **variables)
    assert _seen(renewed) == native
    native_answer = _run("mpich", 4, _WINDOWS, "15", "0").stdout
    assert native_answer.startswith("answer ")
    assert _run("openmpi", 4, _ALONE, "--renew", "0.05", _WINDOWS, "15", "0.01", **variables).stdout == native_answer


def test_parallel_files_are_those_of_mpich_whatever_mpi_carries_the_program(tmp_path: Path) -> None:
    """Open MPI's own shared pointers and ends of strided views differ, or hang, so it is no reference."""
    program = str(_HERE / "programs" / "files.py")
    (tmp_path / "native").mkdir()
    native = _seen(_run("mpich", 4, program, "3", "0", str(tmp_path / "native")))
    assert len(native) == 4
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        assert _seen(_run(kind, 4, _ALONE, program, "3", "0", str(tmp_path / kind))) == native


@pytest.mark.slow
def test_what_may_not_be_done_to_a_file_fails_on_all_ranks(tmp_path: Path) -> None:
    done = _run("mpich", 4, _ALONE, str(_HERE / "programs" / "file_errors.py"), str(tmp_path))
    assert len(_seen(done)) == 4


def test_a_program_does_not_notice_in_its_files_that_its_lower_half_is_renewed(tmp_path: Path) -> None:
    program = str(_HERE / "programs" / "files.py")
    for name in ("left-alone", "renewed"):
        (tmp_path / name).mkdir()
    expected = _seen(_run("mpich", 4, _ALONE, program, "4", "0", str(tmp_path / "left-alone")))
    renewed = _run("mpich", 4, _ALONE, "--renew", "0.05", program, "4", "0", str(tmp_path / "renewed"))
    assert _seen(renewed) == expected
    found = re.search(r"renewed (\d+) times", renewed.stderr)
    assert found is not None and int(found[1]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_windows_do_what_those_of_mpi4py_do(kind: str) -> None:
    native = _run(kind, 4, _WINDOWS, "20", "0").stdout
    assert native.startswith("answer ")
    assert _run(kind, 4, _ALONE, _WINDOWS, "20", "0").stdout == native


def test_windows_do_not_notice_that_their_lower_halves_are_renewed() -> None:
    native = _run("mpich", 4, _WINDOWS, "20", "0").stdout
    renewed = _run("mpich", 4, _ALONE, "--renew", "0.05", _WINDOWS, "20", "0.001")
    assert renewed.stdout == native and "renewed" in renewed.stderr


@pytest.mark.slow
def test_what_may_not_be_done_to_a_window_is_refused() -> None:
    done = _run("mpich", 3, _ALONE, str(_HERE / "programs" / "window_errors.py"))
    assert len(_seen(done)) == 3


@pytest.mark.slow
def test_a_request_that_is_waited_for_twice_is_refused_and_harms_nobody() -> None:
    done = _run("mpich", 2, _ALONE, str(_HERE / "programs" / "twice.py"))
    assert len(_seen(done)) == 2


@pytest.mark.slow
def test_groups_of_sessions_become_communicators_while_the_lower_half_is_renewed() -> None:
    program = str(_HERE / "programs" / "groups.py")
    plain = _seen(_run("openmpi", 4, _ALONE, program, "40"))
    assert len(plain) == 4
    renewed = _run("openmpi", 4, _ALONE, "--renew", "0.02", program, "40")
    assert _seen(renewed) == plain


def test_what_nobody_receives_for_long_is_sent_ahead_again_and_again() -> None:
    """The same program and answer as in test_restarts."""
    command = [_ALONE, "--renew", "0.05", str(_HERE / "programs" / "unreceived.py"), "4", "0.3"]
    done = _run("mpich", 2, *command, UPPER_PYTHON=sys.executable)
    assert "answer b69e3d6536a027e9" in done.stdout.splitlines()
    found = re.search(r"renewed (\d+) times", done.stderr)
    assert found is not None and int(found[1]) > 0
