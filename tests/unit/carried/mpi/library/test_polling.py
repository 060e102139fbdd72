"""A "no" of the lower half holds for a while, and no longer than polling.h says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.carried.mpi.library.building import HERE, CheckedLibrary, output

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("checked_library", ["mpich"], indirect=True)
def test_a_no_holds_for_a_program_that_computes_until_it_learns_something(
    tmp_path: Path, checked_library: CheckedLibrary
) -> None:
    (said,) = output(checked_library.build_alone(tmp_path, HERE / "polls.c"), [])
    assert said.startswith("answer ")
