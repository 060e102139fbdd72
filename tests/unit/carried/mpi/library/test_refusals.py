"""What MPI forbids is refused with the class that it names, by the handler of the object that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.carried.mpi.library.building import HERE, CheckedLibrary, output

pytestmark = pytest.mark.procs


@pytest.fixture(scope="module")
def program(checked_library: CheckedLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``refusals.c`` on the library."""
    return checked_library.link(tmp_path_factory.mktemp("refusals"), "loopback.c", HERE / "refusals.c")


@pytest.mark.parametrize("kind", ["files", "messages", "epochs", "types", "values", "arguments", "buffers"])
def test_what_mpi_forbids_is_refused_with_the_class_that_it_names_and_nothing_else_is(
    program: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output(program, [], kind) == ["answer"]
