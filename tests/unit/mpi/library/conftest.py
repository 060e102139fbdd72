"""One build of the checked programs for all tests of the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.mpi.library.building import HERE, build_lone, build_native, has_compiler


@pytest.fixture(scope="session", params=["mpich", "openmpi", "abi"])
def lone_program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``program.c`` on the library, in each face."""
    if not has_compiler():
        pytest.skip("no C compiler (cc) on PATH")
    return build_lone(request.param, HERE / "program.c", tmp_path_factory.mktemp("lone"))


@pytest.fixture(scope="session", params=["mpich", "openmpi"])
def native_program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``program.c`` on an MPI of others."""
    built = (
        build_native(request.param, HERE / "program.c", tmp_path_factory.mktemp("native")) if has_compiler() else None
    )
    if built is None:
        pytest.skip(f"no {request.param} with mpi.h, or no C compiler: run `make mpi`")
    return built
