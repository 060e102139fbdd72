"""One build of the library and of its programs for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.carried.mpi.library.building import HERE, CheckedLibrary, build_native, has_compiler


@pytest.fixture(
    scope="session", params=["mpich", *(pytest.param(face, marks=pytest.mark.slow) for face in ("openmpi", "abi"))]
)
def checked_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckedLibrary:
    """The library in each face; the processes of one run of tests share it."""
    if not has_compiler():
        pytest.skip("no C compiler (cc) on PATH")
    folder = tmp_path_factory.getbasetemp()
    return CheckedLibrary.build(request.param, folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="session")
def lone_program(checked_library: CheckedLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``program.c`` on the library."""
    return checked_library.link(tmp_path_factory.mktemp("lone"), "lone.c", HERE / "program.c")


@pytest.fixture(scope="session", params=["mpich", pytest.param("openmpi", marks=pytest.mark.slow)])
def native_program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``program.c`` on an MPI of others."""
    built = (
        build_native(request.param, HERE / "program.c", tmp_path_factory.mktemp("native")) if has_compiler() else None
    )
    if built is None:
        pytest.skip(f"no {request.param} with mpi.h, or no C compiler: run `make mpi`")
    return built
