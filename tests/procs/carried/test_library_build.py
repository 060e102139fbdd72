"""The MPI library is compiled when there is something to compile, and not otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from remesh.carried.mpi.library import build as building

pytestmark = pytest.mark.procs


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is compiled, of a copy of the room: nothing in truth."""
    room = tmp_path / "mpi"
    shutil.copytree(building.HERE.parent, room, ignore=shutil.ignore_patterns("built", "*.so", "__pycache__"))
    made: list[Path] = []

    def compile_nothing(command: list[str]) -> str:
        if command[-1] == "--version":
            return "a compiler, 1.0"
        if command[-2] == "-o":
            target = Path(command[-1])
            target.touch()
            made.append(target)
        return ""

    monkeypatch.setattr(building, "HERE", room / "library")
    monkeypatch.setattr(building, "BUILT", room / "library" / "built")
    monkeypatch.setattr(building, "_run", compile_nothing)
    return made


def _num_compiled(compiled: list[Path], into: Path) -> int:
    compiled.clear()
    assert {path.relative_to(into).as_posix() for path in building.build(into)} == {*building.ALL}
    assert all((into / name).exists() for name in building.ALL)
    return len(compiled)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on PATH")
def test_the_library_is_compiled_again_when_something_that_it_is_made_of_has_changed(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "cc")
    into, room = building.BUILT, building.HERE.parent
    whole = _num_compiled(compiled, into)
    assert whole == len(building.ALL)
    assert _num_compiled(compiled, into) == 0
    for name in (
        "library/status.c",
        "library/mpifort/descriptor.h",
        "_calls.h",
        "library/generate.py",
        "library/build.py",
    ):
        with (room / name).open("a") as file:
            file.write("\n")
        assert _num_compiled(compiled, into) == whole, name
    for name in ("library/tables/functions.txt", "calls/error_classes.py"):
        (room / name).write_text((room / name).read_text() + " ")
        assert _num_compiled(compiled, into) == whole, name
    monkeypatch.setenv("CC", "cc -m64")
    assert _num_compiled(compiled, into) == whole
    (into / building.ARENA).unlink()
    assert _num_compiled(compiled, into) == whole
    assert _num_compiled(compiled, into) == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on PATH")
def test_a_build_that_failed_leaves_nothing_that_looks_finished(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    into = building.BUILT
    whole = _num_compiled(compiled, into)
    with pytest.MonkeyPatch.context() as patch, (building.HERE / "status.c").open("a") as file:
        file.write("\n")
        file.flush()
        patch.setattr(building, "build_fortran", lambda *_: (_ for _ in ()).throw(RuntimeError("cc failed")))
        with pytest.raises(RuntimeError, match="cc failed"):
            building.build(into)
    assert _num_compiled(compiled, into) == whole
