"""One-sided communication: windows of a step, and one of the whole program on which much is left unsettled."""

from __future__ import annotations

import random

import numpy as np
from mpi4py import MPI

from random_kinds.state import State

_CELLS = 64


def fenced(state: State, chance: random.Random) -> None:
    """Put and get between two fences."""
    count = chance.choice((1, 100, 10_000))
    memory = np.zeros(count * state.size, np.int64)
    window = MPI.Win.Create(memory, 8, comm=state.world)
    shift = chance.randrange(state.size)
    target, got = (state.rank + shift) % state.size, np.zeros(count, np.int64)
    given = state.numbers(0, count)
    window.Fence()
    window.Put(given, target, count * state.rank)
    window.Fence()
    window.Get(got, (target + 1) % state.size, count * ((state.rank + 1) % state.size))
    window.Fence()
    state.fold(memory, got)
    window.Free()


def counted(state: State, chance: random.Random) -> None:
    """Each takes numbers from one counter: who gets which is open, what is given out is not."""
    root, each = chance.randrange(state.size), chance.randint(1, 4)
    counter = MPI.Win.Allocate(8, 8, comm=state.world)
    counter.tomemory()[:] = bytes(8)
    state.world.Barrier()
    one, got = np.ones(1, np.int64), np.zeros(each, np.int64)
    for turn in range(each):
        counter.Lock(root, chance.choice((MPI.LOCK_SHARED, MPI.LOCK_EXCLUSIVE)))
        counter.Fetch_and_op(one, got[turn : turn + 1], root, 0, MPI.SUM)
        counter.Unlock(root)
    state.fold(sorted(number for some in state.world.allgather(got.tolist()) for number in some))
    counter.Free()


def partners(state: State, chance: random.Random) -> None:
    """Exposed to the one on the left, started to the one on the right."""
    count = chance.choice((1, 5000))
    memory, given = np.zeros(count, np.int64), state.numbers(0, count)
    window = MPI.Win.Create(memory, 8, comm=state.world)
    left, right = (state.rank - 1) % state.size, (state.rank + 1) % state.size
    from_left, to_right = state.world.group.Incl([left]), state.world.group.Incl([right])
    window.Post(from_left)
    window.Start(to_right)
    window.Put(given, right)
    window.Complete()
    window.Wait()
    state.fold(memory)
    from_left.Free()
    to_right.Free()
    window.Free()


def swapped(state: State, chance: random.Random) -> None:
    """One of all ranks wins a compare-and-swap."""
    root = chance.randrange(state.size)
    memory = np.full(1, -1, np.int64)
    window = MPI.Win.Create(memory if state.rank == root else np.zeros(0, np.int64), 8, comm=state.world)
    got, mine, expected = np.zeros(1, np.int64), np.array([state.rank]), np.array([-1])
    window.Lock_all()
    window.Compare_and_swap(mine, expected, got, root, 0)
    window.Unlock_all()
    state.world.Barrier()
    state.fold(sum(state.world.allgather(int(got[0] == -1))))
    window.Free()


def piled_up(state: State, chance: random.Random) -> None:
    """Sums in the window of the program; nobody looks until they are settled."""
    for _ in range(chance.randint(1, 4)):
        target, cell = chance.randrange(state.size), chance.randrange(_CELLS - 4)
        given = state.numbers(cell, 3)
        state.window.Lock(target, MPI.LOCK_SHARED)
        state.window.Accumulate(given, target, cell)
        state.window.Unlock(target)


def settled(state: State, chance: random.Random) -> None:
    """All look at what has piled up."""
    state.world.Barrier()
    got = np.zeros(_CELLS, np.int64)
    state.window.Lock(state.rank, MPI.LOCK_SHARED)
    state.window.Get(got, state.rank)
    state.window.Unlock(state.rank)
    state.fold(got)
    state.world.Barrier()
