"""Communicators that come and go, with their groups, names and attributes."""

from __future__ import annotations

import random

import numpy as np
from mpi4py import MPI

from random_kinds.state import LONGEST_OPEN, State

_MOST = 7
"""Communicators at a time, besides the twins."""


def _keep(state: State, comm: MPI.Intracomm) -> None:
    """It is used from now on; an old one gives way."""
    state.comms.append(comm)
    state.fold(comm.rank, comm.size, comm.allgather(state.rank))
    if len(state.comms) > _MOST:
        _retire(state, state.comms[0])


def _retire(state: State, comm: MPI.Intracomm) -> None:
    """Nobody begins anything on it any more; freed once all that was left open on it is complete."""
    state.comms.remove(comm)
    state.after(LONGEST_OPEN + 1, comm.Free)


def divided(state: State, chance: random.Random) -> None:
    """The members of one, in groups and in an order at random."""
    parent = state.comm(chance)
    colours, keys = ([chance.randrange(3) for _ in range(state.size)] for _ in range(2))
    _keep(state, parent.Split(colours[state.rank], keys[state.rank]))


def twinned(state: State, chance: random.Random) -> None:
    """A duplicate, in three ways, one of which is left open while something else is going on."""
    parent, way = state.comm(chance), chance.randrange(3)
    if way == 0:
        twin = parent.Dup()
    elif way == 1:
        twin = parent.Create(parent.group)
    else:
        twin, request = parent.Idup()
        state.fold(
            parent.sendrecv(state.rank, (parent.rank + 1) % parent.size, 8, None, (parent.rank - 1) % parent.size, 8)
        )
        request.Wait()
    state.fold(MPI.Comm.Compare(parent, twin) == MPI.CONGRUENT)
    _keep(state, twin)


def turned(state: State, chance: random.Random) -> None:
    """Made by its members only: two groups of the world, both turned round."""
    size = state.size
    cut = chance.randrange(size)
    ranks = [rank for rank in reversed(range(size)) if (rank < cut) == (state.rank < cut)]
    group = state.world.group.Incl(ranks)
    comm = state.world.Create_group(group, tag=6)
    group.Free()
    _keep(state, comm)


def retired(state: State, chance: random.Random) -> None:
    """One of them is not used any more."""
    if len(state.comms) > 2:
        _retire(state, state.comm(chance))


def short_lived(state: State, chance: random.Random) -> None:
    """Made, used by some of the ranks, and freed at once."""
    chosen = [chance.random() < 0.6 for _ in range(state.size)]
    comm = state.world.Split(0 if chosen[state.rank] else MPI.UNDEFINED, state.rank)
    if comm == MPI.COMM_NULL:
        return
    count = chance.choice((1, 5000))
    data = state.numbers(0, count)
    into = np.zeros_like(data)
    comm.Allreduce(data, into)
    comm.Bcast(data, comm.size - 1)
    state.fold(into, data)
    comm.Free()


def attributes(state: State, chance: random.Random) -> None:
    """Copied with a communicator, deleted with it, and told about both."""
    told: list[tuple[str, object]] = []

    def copy(comm: MPI.Comm, keyval: int, value: object) -> object:
        told.append(("copied", value))
        return (value, "copy")

    def delete(comm: MPI.Comm, keyval: int, value: object) -> None:
        told.append(("deleted", value))

    keyval = MPI.Comm.Create_keyval(copy, delete)
    parent = state.comm(chance).Dup()
    parent.Set_attr(keyval, ("of", state.rank))
    parent.Set_name(f"number {state.step}")
    twin = parent.Dup()

    def finish() -> None:
        state.fold(twin.Get_attr(keyval), parent.Get_attr(keyval), parent.Get_name())
        parent.Delete_attr(keyval)
        twin.Free()
        parent.Free()
        state.fold(told)
        MPI.Comm.Free_keyval(keyval)

    state.leave(chance, finish)


def groups(state: State, chance: random.Random) -> None:
    """Arithmetic of groups."""
    world = state.world.group
    one, other = (world.Incl(chance.sample(range(state.size), chance.randint(1, state.size))) for _ in range(2))
    made = [MPI.Group.Union(one, other), MPI.Group.Intersection(one, other), MPI.Group.Difference(one, other)]
    for group in made:
        state.fold(group.size, MPI.Group.Translate_ranks(group, list(range(group.size)), world))
        if group != MPI.GROUP_EMPTY:
            group.Free()
