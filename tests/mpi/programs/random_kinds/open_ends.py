"""Point to point that stays open over several steps, on twins of the world that have the same tags."""

from __future__ import annotations

import random

from mpi4py import MPI

from random_kinds.state import State, completed, received, room


def _neighbours(state: State, chance: random.Random) -> tuple[int, int]:
    """Whom to send to and receive from: a few places on, so that all are served, or itself."""
    shift = chance.randrange(state.size)
    return (state.rank + shift) % state.size, (state.rank - shift) % state.size


def unreceived(state: State, chance: random.Random) -> None:
    """Messages that nobody receives for a while, on each twin with one tag; then twin by twin in another order."""
    (to, source), tag, way = _neighbours(state, chance), state.tag_of_step, chance.randrange(5)
    lengths = [[state.length(chance) for _ in range(chance.randint(0, 3))] for _ in state.twins]
    sends = [
        twin.Isend(state.make(10 * number + place, length), to, tag)
        for number, twin in enumerate(state.twins)
        for place, length in enumerate(lengths[number])
    ]
    order = chance.sample(range(len(state.twins)), len(state.twins))

    def finish() -> None:
        for number in order:
            state.fold([received(state.twins[number], source, tag, way) for _ in lengths[number]])
        completed(chance, sends)

    state.leave(chance, finish)


def posted(state: State, chance: random.Random) -> None:
    """Receives without a message, for a while; the messages then come in another order."""
    (to, source), tag = _neighbours(state, chance), state.tag_of_step
    lengths = [state.length(chance) for _ in range(chance.randint(1, 4))]
    twins = [chance.choice(state.twins) for _ in lengths]
    rooms, data = [room(chance, each) for each in lengths], [state.make(*each) for each in enumerate(lengths)]
    receives = [twin.Irecv(into, source, tag) for twin, into in zip(twins, rooms, strict=True)]
    first = chance.choice(state.twins)

    def finish() -> None:
        pairs = sorted(zip(twins, data, strict=True), key=lambda pair: pair[0] is not first)
        sends = [twin.Isend(each, to, tag) for twin, each in pairs]
        statuses = completed(chance, receives + sends)[: len(receives)]
        state.fold(rooms, statuses)

    state.leave(chance, finish)


def synchronous(state: State, chance: random.Random) -> None:
    """A synchronous send is not over before it is received, however long that takes."""
    (to, source), tag, length = _neighbours(state, chance), state.tag_of_step, state.length(chance)
    send = state.twins[0].Issend(state.make(0, length), to, tag)
    state.fold(send.Test())
    # Who is told here has tested.
    state.twins[1].Barrier()

    def finish() -> None:
        state.fold(send.Test())
        state.twins[1].Barrier()
        state.fold(received(state.twins[0], source, tag, chance.randrange(5)))
        send.Wait()

    state.leave(chance, finish)


def persistent(state: State, chance: random.Random) -> None:
    """Requests that are started again and again, over the steps."""
    (to, source), tag, length = _neighbours(state, chance), state.tag_of_step, state.length(chance)
    twin, into, data = chance.choice(state.twins), room(chance, length), state.make(0, length)
    begin = chance.choice((twin.Send_init, twin.Ssend_init))
    requests = [twin.Recv_init(into, source, tag), begin(data, to, tag)]
    turns = chance.randint(1, 3)

    def start() -> None:
        if chance.random() < 0.5:
            MPI.Prequest.Startall(requests)
        else:
            for request in requests:
                request.Start()

    def finish(turn: int) -> None:
        statuses = [MPI.Status(), MPI.Status()]
        MPI.Request.Waitall(requests, statuses)
        state.fold(into, statuses[0])
        if turn < turns:
            data[:] += 1
            start()
            state.after(chance.choice((1, 2, 5)), lambda: finish(turn + 1))
        else:
            for request in requests:
                request.Free()

    start()
    state.leave(chance, lambda: finish(1))


def cancelled(state: State, chance: random.Random) -> None:
    """Receives that are given up after a while."""
    twin, into, status = chance.choice(state.twins), room(chance, 100), MPI.Status()
    receive = twin.Irecv(into, chance.choice((MPI.ANY_SOURCE, 0)), state.tag_of_step)

    def finish() -> None:
        state.fold(receive.Test())
        receive.Cancel()
        receive.Wait(status)
        state.fold(into, status.Is_cancelled())

    state.leave(chance, finish)


def objects_left(state: State, chance: random.Random) -> None:
    """Pickled messages that nobody receives for a while."""
    (to, source), tag = _neighbours(state, chance), state.tag_of_step
    twin, lengths = chance.choice(state.twins), [state.length(chance) for _ in range(chance.randint(1, 3))]
    sends = [twin.isend(state.thing(*each), to, tag) for each in enumerate(lengths)]

    def finish() -> None:
        state.fold([twin.recv(source=source, tag=tag) for _ in lengths])
        MPI.Request.waitall(sends)

    state.leave(chance, finish)
