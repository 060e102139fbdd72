"""Accesses to windows: what each does, and its messages of bounded size.

Every access of MPI's is one of a kind. The memory at the target, taken as one run of bytes, is ``old``; the origin
gives ``data``; then

    old = old (op) data        and, if the access *fetches*, what ``old`` was goes back to the origin

Put is REPLACE, Get is NO_OP that fetches, Fetch_and_op and Get_accumulate are any operation that fetches, and
COMPARE_AND_SWAP has two values as its data: what it writes, and what it expects to find. Source: MPI 4.1, section 12.3.

A long access is cut into *chunks*: each has whole elements, and its runs and data find room in one wire message. An
element is atomic, since one thread serves all accesses to a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from remesh.carried.mpi.calls.table import ACCESS_OPS, EAGER_BYTES, RUN

NO_OP: Final = ACCESS_OPS.index("NO_OP")
COMPARE_AND_SWAP: Final = ACCESS_OPS.index("COMPARE_AND_SWAP")
_SPARE_BYTES: Final = 128
"""Room for one more element, however many runs it lies in: a chunk with less is closed."""

Runs = Sequence[tuple[int, int]]
"""(displacement from the window's base in bytes, bytes > 0) of the target's memory, in the order of the data."""


@dataclass(frozen=True, slots=True)
class Verb:
    """The operation of an access at the target."""

    op: int  # index into ACCESS_OPS
    type: int  # index into REAL_TYPES; of no account for REPLACE, NO_OP and COMPARE_AND_SWAP
    fetches: bool

    def pack(self) -> int:
        """Pack the verb as 31 bits."""
        return self.op | self.type << 8 | self.fetches << 16


@dataclass(frozen=True, slots=True)
class AccessChunk:
    """A part of an access that fits into one message."""

    position: int  # bytes of the access before it
    runs: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes at the target."""
        return sum(length for _, length in self.runs)


def cut(runs: Runs, unit: int, room: int = EAGER_BYTES) -> Iterator[AccessChunk]:
    """Cut an access into chunks of whole elements of ``unit`` bytes (at most 32) that fit into ``room`` (256 or more).

    >>> [chunk.runs for chunk in cut([(0, 600)], 8, 512)]
    [((0, 496),), ((496, 104),)]
    """
    chosen: list[tuple[int, int]] = []
    position = taken = 0
    for offset, length in runs:
        while length:
            space = room - taken - RUN.size * (len(chosen) + 1)
            if taken % unit == 0 and space < _SPARE_BYTES and chosen:
                yield AccessChunk(position, tuple(chosen))
                position, taken, chosen = position + taken, 0, []
                continue
            step = length if length <= space else space - (taken + space) % unit
            chosen.append((offset, step))
            offset, length, taken = offset + step, length - step, taken + step
    if chosen:
        yield AccessChunk(position, tuple(chosen))


def pack_runs(runs: Runs) -> bytes:
    """Pack runs as bytes."""
    return b"".join(RUN.pack(*run) for run in runs)


def unpack_runs(data: bytes | bytearray | memoryview, num_runs: int) -> list[tuple[int, int]]:
    """Unpack what `pack_runs` made. ValueError if there are not so many runs, or one has a negative length."""
    if not 0 <= num_runs * RUN.size <= len(data):
        raise ValueError(f"{num_runs} runs in {len(data)} bytes")
    runs = list(RUN.iter_unpack(data[: num_runs * RUN.size]))
    if any(length < 0 for _, length in runs):
        raise ValueError("a run of negative length")
    return runs
