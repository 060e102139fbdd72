"""The room's benchmarks run, tiny: a walk over three configurations, costs, images."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.mpi import c_programs, costs, images, in_place, whole_runs
from benchmarks.mpi.chain import (
    ALL,
    ONE_HOST,
    all_pairs_walk,
    carried_python,
    native_answer,
    native_python,
    run_command,
)

pytestmark = pytest.mark.mpi


def test_the_walk_restarts_every_ordered_pair_once() -> None:
    walk = all_pairs_walk(ALL)
    pairs = list(itertools.pairwise(walk))
    assert len(pairs) == len(set(pairs)) == len(ALL) * (len(ALL) - 1) >= 180


def test_a_chain_of_restarts_gives_the_answer_of_a_real_mpi() -> None:
    walk = run_command(*carried_python("fft", 150, 0.01), [ONE_HOST[0], ONE_HOST[2], ONE_HOST[4]], seed=1)
    assert walk.answer == native_answer(*native_python("fft", 150)), walk.cause
    assert len(walk.cut_s) == 2


def test_costs_are_measured_beside_native() -> None:
    found = {row.case.partition(": ")[2]: row for row in costs.rows(100, 1, [("mpich", "shm")])}
    assert {
        "added to latency of 8 bytes, from Python",
        "added to write of 8 bytes to a file",
        "bandwidth, 64 MiB",
    } <= set(found)
    for call in ("fetch-and-add of a window, with flush", "write of 8 bytes to a file"):
        assert all(found[f"{call}, {way}"].value > 0 for way in ("native", "carried"))


def test_what_a_rank_costs_beside_a_program_in_c_is_measured() -> None:
    found = {row.case.partition(": ")[2]: row for row in c_programs.rows(100, 1, [("mpich", "shm")])}
    assert {"added to latency of 8 bytes", "added to Comm_rank"} <= set(found)
    assert found["start and end, processor time added per rank"].value > 0
    beside, alone = (
        found[f"memory {what}"].value
        for what in ("beside the program", "of the MPI library alone, in a native program")
    )
    assert beside > alone > 1e6


def test_calls_in_place_are_measured_beside_native_and_two_processes() -> None:
    found = {row.case.partition(": ")[2]: row for row in in_place.rows(20, 1, [("mpich", "shm")])}
    for name in ("latency", "allreduce"):
        assert found[f"{name} of 8 bytes, native"].value > 0
        assert {f"{name} of 8 bytes, added in place", f"{name} of 8 bytes, added with two processes a rank"} <= set(
            found
        )
    assert found["loading a lower half"].value > 0


@pytest.mark.netns
def test_bandwidth_between_hosts_is_measured_on_links_of_a_real_rate() -> None:
    found = {row.case.partition(": ")[2]: row for row in costs.host_rows("10gbit", 20, 1, [("mpich", "ofi")])}
    assert all(found[f"bandwidth, {mib} MiB"].value > 0 for mib in (1, 8, 64))
    # A link of 1.25 GB/s lets no more than that pass, but for the first 1.25 MB of 64 MiB.
    assert all(found[f"native's bandwidth, {mib} MiB"].value < 1.3 for mib in (1, 8, 64))


def test_an_increment_is_smaller_than_a_full_image() -> None:
    rows = {row.case.partition(": ")[2]: row for row in images.rows(32, repeat=1)}
    assert rows["size with 10 % changed over full"].value < 0.5
    assert rows["restart under openmpi"].value > 0


def test_many_objects_are_there_after_a_restart() -> None:
    rows = images.object_rows(20)
    assert len(rows) == 4 and all(row.value > 0 for row in rows)


def test_whole_runs_are_measured_beside_native() -> None:
    rows = whole_runs.rows(1, share=0.01)
    assert len(rows) >= len(whole_runs.OWN_RUNS) and all(row.value > 0 for row in rows)


def test_the_share_of_mpi_in_a_restart_is_measured_under_each_mpi() -> None:
    rows = {row.case.partition(": ")[2]: row for row in images.restart_rows(16)}
    for mpi in ("openmpi", "mpich", "impi"):
        assert 0 < rows[f"MPI_Init and replay in a restart under {mpi}"].value < 1
    assert rows["checkpoint over write and fsync"].value > 0
