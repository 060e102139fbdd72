"""Requests and sessions of the C library at their ends, on a slow lower half; every access to memory is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.carried.mpi.library.building import HERE, CheckedLibrary, output

pytestmark = pytest.mark.procs


@pytest.fixture(scope="module")
def program(checked_library: CheckedLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``requests.c`` on the library."""
    return checked_library.link(tmp_path_factory.mktemp("requests"), "loopback.c", HERE / "requests.c")


def test_a_thread_that_waits_for_partitions_lets_them_be_sent_first(program: Path) -> None:
    assert output(program, [], "partitions") == ["answer"]


def test_mpi_ends_when_sends_whose_requests_were_freed_are_over(program: Path) -> None:
    assert output(program, [], "freed") == ["answer"]


def test_communicators_that_sessions_free_are_forgotten(program: Path) -> None:
    assert output(program, [], "sessions") == ["answer"]
