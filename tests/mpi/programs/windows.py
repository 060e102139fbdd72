"""One-sided communication of all kinds: a counter, a histogram, halos, a ring of partners, and a ledger under a lock.

Whoever has the ledger's lock sleeps with it, so that the others wait for it most of the time.
"""

import array
import hashlib
import sys
import time

from gate import wait_at_gate
from mpi4py import MPI

CELLS, BINS, LONG = 8, 16, 20_000


def main(steps: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    counter = MPI.Win.Allocate(8 if rank == 0 else 0, 8, comm=comm)
    bins = MPI.Win.Allocate(8 * BINS, 8, comm=comm)
    cells = array.array("q", [rank * 100 + i for i in range(CELLS + 2)])
    halos = MPI.Win.Create(cells, 8, comm=comm)
    tokens = array.array("q", [0] * LONG)
    ring = MPI.Win.Create_dynamic(comm=comm)
    ring.Attach(tokens)
    places = comm.allgather(MPI.Get_address(tokens))
    ledger = MPI.Win.Allocate(16 if rank == 0 else 0, 8, comm=comm)
    seen = hashlib.sha256()
    claimed = 0
    for step in range(steps):
        if rank == 0 and step == steps - 1:
            wait_at_gate()
        claimed += claim(counter)
        count(bins, rank, step, size)
        exchange(halos, cells, left, right)
        pass_on(ring, tokens, places, (rank, left, right), step)
        book(ledger, rank + step, pause_s)
        seen.update(cells.tobytes() + tokens.tobytes())
    comm.Barrier()
    if rank == 0:
        ledger.Lock(0)
        seen.update(bytes(ledger.tomemory()))
        ledger.Unlock(0)
    seen.update(bytes(bins.tomemory()))
    assert comm.allreduce(claimed) == sum(range(steps * size))
    ring.Detach(tokens)
    for window in (counter, bins, halos, ring, ledger):
        window.Free()
    digests = comm.gather(seen.hexdigest())
    if rank == 0:
        print("answer", hashlib.sha256("".join(digests).encode()).hexdigest()[:16], flush=True)


def claim(counter: MPI.Win) -> int:
    """The next number of a counter that all ranks share."""
    one, was = array.array("q", [1]), array.array("q", [0])
    counter.Lock(0, MPI.LOCK_SHARED)
    counter.Fetch_and_op(one, was, 0, 0, MPI.SUM)
    counter.Unlock(0)
    return was[0]


def count(bins: MPI.Win, rank: int, step: int, size: int) -> None:
    """Values go to bins of all ranks, every other one of them by a strided datatype."""
    every_other = MPI.LONG_LONG.Create_vector(3, 1, 2).Commit()
    for target in range(size):
        value = (rank * 7 + step * 13 + target) % BINS
        bins.Lock(target, MPI.LOCK_SHARED)
        bins.Accumulate(array.array("q", [1]), target, value)
        bins.Raccumulate(array.array("q", [1, 2, 3]), target, (value % 8, 1, every_other), MPI.SUM).Wait()
        bins.Unlock(target)
    every_other.Free()


def exchange(halos: MPI.Win, cells: "array.array[int]", left: int, right: int) -> None:
    """Cells at the ends go to the neighbours; then each is moved on by those beside it."""
    halos.Fence()
    halos.Put(cells[1:2], left, CELLS + 1)
    halos.Put(cells[CELLS : CELLS + 1], right, 0)
    halos.Fence()
    cells[1 : CELLS + 1] = array.array(
        "q", [(cells[i - 1] + 2 * cells[i] + cells[i + 1]) % 1_000_003 for i in range(1, CELLS + 1)]
    )


def pass_on(
    ring: MPI.Win, tokens: "array.array[int]", places: list[int], ranks: tuple[int, int, int], step: int
) -> None:
    """A long message to the right by partners: exposed to the left neighbour, started to the right one."""
    rank, left, right = ranks
    world = ring.Get_group()
    from_left, to_right = world.Incl([left]), world.Incl([right])
    given = array.array("q", [tokens[i] + rank + step + i for i in range(LONG)])
    ring.Post(from_left)
    ring.Start(to_right)
    ring.Put(given, right, places[right])
    ring.Complete()
    ring.Wait()


def book(ledger: MPI.Win, amount: int, pause_s: float) -> None:
    """Read, think, write: right only if nobody else does so meanwhile."""
    page = array.array("q", [0, 0])
    ledger.Lock(0, MPI.LOCK_EXCLUSIVE)
    ledger.Get(page, 0)
    ledger.Flush(0)
    time.sleep(pause_s)
    page[0] += amount
    page[1] += 1
    ledger.Put(page, 0)
    ledger.Unlock(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
