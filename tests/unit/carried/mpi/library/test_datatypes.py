"""Datatypes of the C library are what a list of values with offsets says, and what other MPIs make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiles import seeds
from tests.unit.carried.mpi.library.building import CheckedLibrary, output
from tests.unit.carried.mpi.library.datatype_oracle import Program, random_program

pytestmark = pytest.mark.procs


def _in_face(program: Program, said: list[str], *, is_mpich: bool) -> list[tuple[int, str]]:
    """Lines that must be as expected; numbers of orders and distributions are those of MPICH's face."""
    kept = []
    for number, line in enumerate(said):
        has_numbers = "array" in program.expected[number]
        if is_mpich or not has_numbers:
            kept.append((number, line))
    return kept


@pytest.mark.parametrize("seed", seeds(12, quick=4))
def test_random_nested_datatypes_are_their_typemaps(
    checked_library: CheckedLibrary, lone_program: Path, seed: int
) -> None:
    program = random_program(seed, 40)
    said = output(lone_program, program.lines)
    assert len(said) == len(program.expected)
    for number, line in _in_face(program, said, is_mpich=checked_library.face == "mpich"):
        assert line == program.expected[number], (seed, number)


@pytest.mark.parametrize("seed", range(100, 104))
def test_other_mpis_have_the_same_bounds_and_packed_bytes(native_program: Path, seed: int) -> None:
    # MPICH's external form takes no pairs, and its sizes of some types are others.
    program = random_program(seed, 40, least=1).without_external()
    said = output(native_program, program.lines)
    assert len(said) == len(program.expected)
    for number, line in _in_face(program, said, is_mpich=native_program.name.endswith("mpich")):
        assert number in program.overlapping or line == program.expected[number], (seed, number)


def test_a_million_blocks_and_nested_vectors_take_no_memory_for_each(lone_program: Path) -> None:
    lines, old = [], 3
    for number, (count, stride) in enumerate([(1000, 3), (1000, 2), (1000, 2)], start=20):
        lines.append(f"vector {number} {old} {count} 1 {stride}")
        old = number
    # In the first type a thousand values of 8 bytes, three apart; then two extents apart, twice.
    first = (999 * 3 + 1) * 8
    second = (999 * 2 + 1) * first
    third = (999 * 2 + 1) * second
    assert output(lone_program, [*lines, "bounds 22"]) == [f"8000000000 0 {third} 0 {third}"]


def test_packing_tells_a_regular_row_from_one_that_is_not(lone_program: Path) -> None:
    """Blocks at 0, 4, 8 and 13: the first three are a row, the last one is beside it."""
    said = output(
        lone_program,
        ["indexed_block 20 0 4 2 0 4 8 13", "pack 20 1 0 16", "indexed 21 0 3 1 2 1 0 1 3", "pack 21 1 0 4"],
    )
    memory = bytes(i * 7 for i in range(16))
    assert said[0] == bytes(memory[i] for i in (0, 1, 4, 5, 8, 9, 13, 14)).hex()
    assert said[2] == memory[:4].hex()
