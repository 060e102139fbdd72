"""Point to point, over before the step is."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
from mpi4py import MPI

from random_kinds.state import State, completed, one_of, received, room

warnings.filterwarnings("ignore", "the 'buf' argument is deprecated")  # the only way to receive a long object by irecv


def ring(state: State, chance: random.Random) -> None:
    """Everybody to one a few places on, which may be itself."""
    comm, length, tag = state.comm(chance), state.length(chance), chance.randrange(5)
    into, status, shift = room(chance, length), MPI.Status(), one_of(chance, comm.size)
    to, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
    comm.Sendrecv(state.make(0, length), to, tag, into, source, tag, status)
    state.fold(into, status)


def replaced(state: State, chance: random.Random) -> None:
    """The same with one buffer."""
    comm, shift = state.comm(chance), chance.randrange(5)
    data, status = state.make(0, state.length(chance)), MPI.Status()
    comm.Sendrecv_replace(data, (comm.rank + shift) % comm.size, 1, (comm.rank - shift) % comm.size, 1, status)
    state.fold(data, status)


def several(state: State, chance: random.Random) -> None:
    """Messages between pairs at random, some of a pair with one tag; begun in one order, completed in another."""
    comm = state.comm(chance)
    lengths = [state.length(chance) for _ in range(chance.randint(1, 12))]
    plan = [(one_of(chance, comm.size), one_of(chance, comm.size), chance.randrange(3), each) for each in lengths]
    rooms = [room(chance, length) for *_, length in plan]
    mine = [number for number, (_, to, _, _) in enumerate(plan) if to == comm.rank]
    requests = [comm.Irecv(rooms[number], plan[number][0], plan[number][2]) for number in mine]
    for number, (source, to, tag, length) in enumerate(plan):
        if source == comm.rank:
            requests.append(comm.Isend(state.make(number, length), to, tag))
    statuses = completed(chance, requests)[: len(mine)]
    state.fold([rooms[number] for number in mine], statuses)


def modes(state: State, chance: random.Random) -> None:
    """Synchronous, buffered and ready sends, the last into a receive that is surely there."""
    comm, length, shift = state.comm(chance), state.length(chance), chance.randrange(4)
    into, status = room(chance, length), MPI.Status()
    mode = chance.choice(("Send", "Ssend", "Bsend", "Rsend", "Isend", "Issend", "Ibsend", "Irsend"))
    MPI.Attach_buffer(bytearray(length + MPI.BSEND_OVERHEAD))
    receive = comm.Irecv(into, (comm.rank - shift) % comm.size, 2)
    comm.Barrier()
    sent = getattr(comm, mode)(state.make(0, length), (comm.rank + shift) % comm.size, 2)
    if sent is not None:
        sent.Wait()
    receive.Wait(status)
    MPI.Detach_buffer()
    state.fold(into, status)


def fan_in(state: State, chance: random.Random) -> None:
    """Everybody to one rank that takes what comes: of each sender and tag in order."""
    comm, each = state.comm(chance), chance.randint(1, 3)
    root, wildcard, way = one_of(chance, comm.size), chance.choice((MPI.ANY_TAG, 3)), chance.randrange(5)
    lengths = [state.length(chance) for _ in range(each)]
    tags = [3 if wildcard == 3 else chance.randrange(2) for _ in range(each)]
    sends = [comm.Isend(state.make(number, lengths[number]), root, tags[number]) for number in range(each)]
    if comm.rank == root:
        got = [received(comm, MPI.ANY_SOURCE, wildcard, way) for _ in range(each * comm.size)]
        state.fold(sorted(got, key=lambda pair: (pair[1].source, pair[1].tag)))
    completed(chance, sends)
    # Before it nobody may send more to a rank that takes anything.
    comm.Barrier()


def nowhere(state: State, chance: random.Random) -> None:
    """To and from PROC_NULL."""
    into, status = np.full(8, 7, np.uint8), MPI.Status()
    comm = chance.choice(state.comms + state.twins)
    comm.Send(into, MPI.PROC_NULL, 1)
    comm.Recv(into, MPI.PROC_NULL, 1, status)
    state.fold(into, status, comm.recv(source=MPI.PROC_NULL))
    request = comm.Irecv(into, MPI.PROC_NULL)
    request.Wait(status)
    state.fold(into, status)


def objects(state: State, chance: random.Random) -> None:
    """Pickled: a ring of them, in four ways."""
    comm, length, shift = state.comm(chance), state.length(chance), chance.randrange(4)
    to, source, status = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size, MPI.Status()
    thing, way = state.thing(0, length), chance.randrange(4)
    if way == 0:
        state.fold(comm.sendrecv(thing, to, 3, None, source, 3, status))
    elif way == 1:
        request = comm.isend(thing, to, 3)
        state.fold(comm.recv(None, source, 3, status))
        request.wait()
    elif way == 2:
        request = comm.issend(thing, to, 3)
        state.fold(comm.mprobe(source, 3, status).recv())
        request.wait()
    else:
        requests = [comm.irecv(length + 1000, source, 3), comm.isend(thing, to, 3)]
        state.fold(MPI.Request.waitall(requests)[0])
    state.fold(status.source if way < 3 else None)


def threads(state: State, chance: random.Random) -> None:
    """One thread for each twin, each with a conversation of its own."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    lengths = [state.length(chance) for _ in range(4)]
    data = [[state.make(10 * lane + turn, length) for turn, length in enumerate(lengths)] for lane in range(2)]
    got: list[list[np.ndarray]] = [[np.zeros(length, np.uint8) for length in lengths] for _ in range(2)]

    def talk(lane: int) -> None:
        comm = state.twins[lane]
        for mine, into in zip(data[lane], got[lane], strict=True):
            comm.Sendrecv(mine, (comm.rank + 1) % comm.size, 5, into, (comm.rank - 1) % comm.size, 5)

    workers = [threading.Thread(target=talk, args=(lane,)) for lane in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    state.fold(got)
