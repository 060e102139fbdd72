"""Parallel files that stay open over some steps; they lie in the working directory and are removed."""

from __future__ import annotations

import random

import numpy as np
from mpi4py import MPI

from random_kinds.state import State

_MODE = MPI.MODE_RDWR | MPI.MODE_CREATE | MPI.MODE_DELETE_ON_CLOSE


def records(state: State, chance: random.Random) -> None:
    """Written together through views that interleave, read back later by the next rank's view."""
    count, blocks = chance.choice((1, 50, 3000)), chance.randint(1, 3)
    file = MPI.File.Open(state.world, f"records-{state.step}", _MODE)
    part = MPI.INT64_T.Create_vector(blocks, count, count * state.size).Commit()

    def view(rank: int) -> None:
        file.Set_view(8 * count * rank, MPI.INT64_T, part)

    view(state.rank)
    file.Write_all(state.numbers(0, count * blocks))
    file.Sync()
    state.world.Barrier()
    file.Sync()

    def finish() -> None:
        got = np.zeros(count * blocks, np.int64)
        view((state.rank + 1) % state.size)
        file.Read_at_all(0, got)
        state.fold(got, file.Get_size())
        file.Close()
        part.Free()

    state.leave(chance, finish)


def shared_pointer(state: State, chance: random.Random) -> None:
    """Written in the order of ranks, read by all."""
    count = chance.choice((1, 700))
    file = MPI.File.Open(state.world, f"ordered-{state.step}", _MODE)
    file.Write_ordered(state.numbers(0, count))

    def finish() -> None:
        got = np.zeros(count * state.size, np.int64)
        file.Read_at_all(0, got)
        state.fold(got)
        file.Close()

    state.leave(chance, finish)
