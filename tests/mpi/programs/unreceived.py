"""Long messages that nobody receives for a while, and are then received in another order: arrays and objects.

``unreceived.py ROUNDS PAUSE_S``: in each round every rank starts sends of several lengths to the next one, which passes
short messages on meanwhile; ends with a digest of all that was received.
"""

import hashlib
import sys
import time

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
after, before = (rank + 1) % size, (rank - 1) % size
LENGTHS = (40_000, 300_001, 1 << 20, (3 << 20) + 7, 33_000, (1 << 20) + 1)
OBJECT, SYNCHRONOUS, TOKEN = 100, 101, 102


def make(sender: int, number: int, length: int) -> np.ndarray:
    """What a rank sends in a round."""
    return np.random.default_rng([sender, number, length]).integers(0, 256, length, dtype=np.uint8)


def send_all(number: int) -> tuple[list[MPI.Request], list[np.ndarray]]:
    """Start to send; the second are the buffers."""
    buffers = [make(rank, number, length) for length in LENGTHS]
    requests = [comm.Isend(buffer, after, tag) for tag, buffer in enumerate(buffers)]
    requests.append(comm.isend({"round": number, "data": bytes(buffers[1]) * 2}, after, OBJECT))
    buffers.append(make(rank, number, 200_000))
    requests.append(comm.Issend(buffers[-1], after, SYNCHRONOUS))
    return requests, buffers


def pass_tokens_on(pause_s: float) -> None:
    """Short messages overtake nothing and are held up by nothing."""
    for turn in range(5):
        assert comm.sendrecv((rank, turn), after, TOKEN, source=before, recvtag=TOKEN) == (before, turn)
        time.sleep(pause_s / 5)


def receive(number: int, tag: int) -> np.ndarray:
    """One array, in one of the ways there are."""
    into = np.zeros(LENGTHS[tag] + 5, dtype=np.uint8)
    status = MPI.Status()
    if tag % 3 == 0:
        comm.Mprobe(before, tag).Recv(into, status)
    elif tag % 3 == 1:
        comm.Recv(into, before, tag, status)
    else:
        into = np.frombuffer(bytearray(LENGTHS[tag]), dtype=np.uint8)
        comm.Irecv(into, before, tag).Wait(status)
    assert status.Get_count(MPI.BYTE) == LENGTHS[tag]
    assert np.array_equal(into[: LENGTHS[tag]], make(before, number, LENGTHS[tag])), (number, tag)
    assert not into[LENGTHS[tag] :].any()
    return into[: LENGTHS[tag]]


def main(num_rounds: int, pause_s: float) -> None:
    digest = hashlib.sha256()
    for number in range(num_rounds):
        requests, buffers = send_all(number)
        pass_tokens_on(pause_s)
        if rank == 0 and number == num_rounds - 1:
            wait_at_gate()
        synchronous = requests[-1]
        assert not synchronous.Test(), "nobody has received it"
        comm.Barrier()
        for tag in reversed(range(len(LENGTHS))):
            digest.update(receive(number, tag))
        said = comm.recv(source=before, tag=OBJECT)
        assert said == {"round": number, "data": bytes(make(before, number, LENGTHS[1])) * 2}
        into = np.zeros(200_000, dtype=np.uint8)
        comm.Recv(into, before, SYNCHRONOUS)
        assert np.array_equal(into, make(before, number, 200_000))
        MPI.Request.Waitall(requests)
        del buffers
    parts = comm.gather(digest.hexdigest())
    if rank == 0:
        print("answer", hashlib.sha256("".join(parts).encode()).hexdigest()[:16], flush=True)


main(int(sys.argv[1]), float(sys.argv[2]))
