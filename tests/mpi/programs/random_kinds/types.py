"""Derived datatypes, made and freed: a message that is taken out of one layout and put into another."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import lcm

import numpy as np
from mpi4py import MPI

from random_kinds.state import State

_INT = MPI.INT
_WIDTH = 4


def _resized(chance: random.Random) -> MPI.Datatype:
    return _nested(_INT.Create_contiguous(2), lambda base: base.Create_resized(0, _WIDTH * chance.randint(2, 5)))


def _struct(chance: random.Random) -> MPI.Datatype:
    return MPI.Datatype.Create_struct([1, 2], [0, _WIDTH * chance.randint(2, 4)], [_INT, _INT])


def _strided_struct(chance: random.Random) -> MPI.Datatype:
    return _nested(_INT.Create_vector(2, 1, 3), lambda base: base.Create_hvector(2, 1, _WIDTH * chance.randint(4, 7)))


def _nested(inner: MPI.Datatype, make: Callable[[MPI.Datatype], MPI.Datatype]) -> MPI.Datatype:
    """A type of another, which is freed at once."""
    outer = make(inner)
    inner.Free()
    return outer


LAYOUTS: tuple[Callable[[random.Random], MPI.Datatype], ...] = (
    lambda chance: _INT.Create_contiguous(chance.randint(1, 4)),
    lambda chance: _INT.Create_vector(chance.randint(1, 3), 2, chance.randint(2, 4)),
    lambda chance: _INT.Create_hvector(2, 1, _WIDTH * chance.randint(1, 4)),
    lambda chance: _INT.Create_indexed([1, 0, 2], [chance.randint(0, 1), 2, chance.randint(2, 5)]),
    lambda chance: _INT.Create_indexed_block(1, chance.sample(range(6), 3)),
    lambda chance: _INT.Create_hindexed([2, 1], [_WIDTH * 3, _WIDTH * chance.randint(0, 2)]),
    lambda chance: _INT.Create_subarray([3, 4], [2, chance.randint(1, 3)], [1, chance.randint(0, 1)]),
    _resized,
    _struct,
    _strided_struct,
)


def _array_for(datatype: MPI.Datatype, count: int) -> np.ndarray:
    """Zeros that hold so many of the type, and two more integers."""
    _, extent = datatype.Get_extent()
    true_start, true_extent = datatype.Get_true_extent()
    return np.zeros((extent * max(count - 1, 0) + true_start + true_extent) // _WIDTH + 2, np.int32)


def between_layouts(state: State, chance: random.Random) -> None:
    """A ring of messages; gaps of the receiver stay as they are."""
    comm, shift = state.comm(chance), chance.randrange(4)
    given, taken = (chance.choice(LAYOUTS)(chance).Commit() for _ in range(2))
    num_ints = lcm(given.Get_size(), taken.Get_size()) // _WIDTH * chance.choice((0, 1, 3, 500, 3000, 30_000))
    num_given, num_taken = (num_ints * _WIDTH // each.Get_size() for each in (given, taken))
    data, into = _array_for(given, num_given), _array_for(taken, num_taken)
    data[:] = state.numbers(0, len(data)) % (1 << 31)
    status = MPI.Status()
    receive = comm.Irecv([into, num_taken, taken], (comm.rank - shift) % comm.size)
    comm.Send([data, num_given, given], (comm.rank + shift) % comm.size)
    receive.Wait(status)
    state.fold(into, status, status.Get_count(taken), status.Get_elements(_INT))
    for each in (given, taken):
        each.Free()


def packed(state: State, chance: random.Random) -> None:
    """Packed and unpacked in the portable form, which is the same everywhere."""
    # From the beginning of the buffer on, as many as it holds.
    datatype = _nested(chance.choice(LAYOUTS)(chance), lambda base: base.Create_resized(0, base.ub)).Commit()
    data = np.zeros(datatype.extent * chance.choice((1, 7, 400)) // _WIDTH, np.int32)
    data[:] = state.numbers(0, len(data)) % (1 << 31)
    wide = bytearray(data.nbytes)
    end = datatype.Pack_external("external32", data, wide, 0)
    into = np.zeros_like(data)
    datatype.Unpack_external("external32", wide, 0, into)
    state.fold(wide, end, into, datatype.Get_extent(), datatype.Get_true_extent())
    datatype.Free()
