"""Attributes, infos, groups and Fortran's datatypes of the C library are as the standard says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.mpi.library.building import HERE, build_lone, has_compiler, output

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("face", ["mpich", "openmpi", "abi"])
def test_objects_of_a_program_live_and_end_as_the_standard_says(tmp_path: Path, face: str) -> None:
    if not has_compiler():
        pytest.skip("no C compiler (cc) on PATH")
    (said,) = output(build_lone(face, HERE / "objects.c", tmp_path), [])
    assert said.startswith("answer ")
