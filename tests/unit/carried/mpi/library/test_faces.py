"""How the library gets in front of the MPI that a program was linked with: on real ELF files, as linkers make them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from remesh.carried.mpi.library.build import ARENA, BUILT, LIBRARIES, OTHER_NAMES
from remesh.carried.mpi.library.program_faces import check_program, library_environment, read_linkage
from remesh.foundation.errors import ConfigError
from tests.unit.carried.mpi.library.building import has_compiler

pytestmark = [pytest.mark.procs, pytest.mark.skipif(not has_compiler(), reason="no C compiler (cc) on PATH")]

_NAMES = sorted({*LIBRARIES.values(), *OTHER_NAMES})


def _link(folder: Path, *options: str) -> Path:
    """A program that does nothing and needs no libc."""
    source, program = folder / "program.c", folder / "program"
    source.write_text("void _start(void) { for (;;); }\n")
    subprocess.run(["cc", "-nostdlib", str(source), *options, "-o", str(program)], check=True)
    return program


def _with_library(folder: Path, name: str, *options: str) -> Path:
    """A program that is linked with a library of this name."""
    empty = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", os.devnull]
    subprocess.run([*empty, "-o", str(folder / name)], check=True)
    return _link(folder, "-Wl,--no-as-needed", f"-L{folder}", f"-l:{name}", *options)


@pytest.mark.parametrize("name", _NAMES)
def test_a_program_finds_the_library_by_the_search_path_alone(tmp_path: Path, name: str) -> None:
    program = _with_library(tmp_path, name, "-Wl,--enable-new-dtags,-rpath,/opt/mpi/lib")
    environment = library_environment(program, {"LD_LIBRARY_PATH": "/users/own"})
    assert environment["LD_LIBRARY_PATH"] == f"{BUILT}:/users/own"
    assert "LD_PRELOAD" not in environment


@pytest.mark.parametrize("name", _NAMES)
def test_a_program_with_a_path_that_comes_first_gets_its_own_face_before_that(tmp_path: Path, name: str) -> None:
    program = _with_library(tmp_path, name, "-Wl,--disable-new-dtags,-rpath,/opt/mpi/lib")
    environment = library_environment(program, {"LD_PRELOAD": "users.so", "REMESH_SHARED_ARRAYS": "1"})
    assert environment["LD_PRELOAD"] == f"{BUILT / name} {BUILT / ARENA} users.so"


@pytest.mark.parametrize(("chosen", "face"), [("openmpi", "openmpi"), ("", "mpich"), ("impi", "mpich")])
def test_its_user_may_choose_for_whom_the_programs_mpi4py_was_built(chosen: str, face: str) -> None:
    found = library_environment(None, {"MPI4PY_MPIABI": chosen, "MPI4PY_LIBMPI": "/opt/mpi/lib/libmpi.so"})
    assert (found["MPI4PY_MPIABI"], found["MPI4PY_LIBMPI"]) == (face, str(BUILT / LIBRARIES[face]))


@pytest.mark.parametrize("option", ["-static", "-static-pie"])
def test_a_static_program_is_refused_by_name(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=r"program: it is linked statically, so its MPI cannot be replaced"):
        check_program(_link(tmp_path, option))


def test_what_is_no_program_of_this_machine_is_none_of_our_business(tmp_path: Path) -> None:
    for text in (b"", b"#!/bin/sh\nexec ./a.out\n", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(70)):
        script = tmp_path / "script"
        script.write_bytes(text)
        linkage = read_linkage(script)
        assert linkage is None or not linkage.needed
