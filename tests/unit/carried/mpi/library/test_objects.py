"""Attributes, infos, groups and Fortran's datatypes of the C library are as the standard says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.carried.mpi.library.building import HERE, CheckedLibrary, output

pytestmark = pytest.mark.procs


def test_objects_of_a_program_live_and_end_as_the_standard_says(
    tmp_path: Path, checked_library: CheckedLibrary
) -> None:
    (said,) = output(checked_library.link(tmp_path, "lone.c", HERE / "objects.c"), [])
    assert said.startswith("answer ")
