"""A walk through the surface: prints one checksum per rank, the same on a real MPI and on the library."""

from __future__ import annotations

import array
import random
import sys
import zlib

from mpi4py import MPI


def collect(comm: MPI.Intracomm, step: int, count: int) -> bytes:
    """Collectives on ``count`` numbers for each rank, some of them in place: what came of all."""
    num, root = count * comm.size, step % comm.size
    mine = array.array("q", range(step + comm.rank, step + comm.rank + num))
    parts, total, whole = (array.array("q", bytes(8 * num)) for _ in range(3))
    comm.Alltoall(mine, parts)
    comm.Allreduce(mine, total, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, parts, MPI.MAX)
    comm.Alltoall(MPI.IN_PLACE, total)
    request = comm.Iallgather(mine[:count], whole)
    comm.Reduce(MPI.IN_PLACE if comm.rank == root else mine, mine, MPI.SUM, root)
    comm.Bcast(mine, root)
    request.Wait()
    return b"".join(map(bytes, (mine, parts, total, whole)))


def main(num_steps: int) -> None:
    """Point to point, objects, matched probes, and collectives of all forms on several communicators."""
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    rows, columns, twin = world.Split(rank // 2, rank), world.Split(rank % 2, rank), world.Dup()
    left, right = (rank - 1) % size, (rank + 1) % size
    chance = random.Random(7)
    seen = 0
    for step in range(num_steps):
        num_bytes = chance.choice([3, 500, 40_000, 200_000, 1_500_000 if step % 10 == 0 else 7])
        payload, received = bytes([(rank + step) % 251]) * num_bytes, bytearray(num_bytes)
        requests = [twin.Irecv(received, left, step % 5)]
        mine, largest, sums = array.array("q", [rank + step] * 5), array.array("q", [0] * 5), array.array("q", [0] * 5)
        if step % 3 == 0:
            requests.append(world.Iallreduce(mine, largest, MPI.MAX))
        requests.append(twin.Isend(payload, right, step % 5))
        (rows if step % 2 else columns).Allreduce(mine, sums)
        MPI.Request.Waitall(requests)
        for data in (received, sums, largest):
            seen = zlib.crc32(data, seen)
        if step % 7 == 0:
            filler = b"y" * chance.choice([1, 100_000])
            got = world.sendrecv((step, rank, filler), right, 3, None, left, 3)
            seen = zlib.crc32(repr(got[:2]).encode(), seen)
        if step % 11 == 0 and rank == 0:
            status = MPI.Status()
            senders = {}
            for _ in range(size - 1):
                message = world.mprobe(MPI.ANY_SOURCE, 77, status)
                senders[status.source] = message.recv()
            seen = zlib.crc32(repr(sorted(senders.items())).encode(), seen)
        elif step % 11 == 0:
            world.ssend(rank * step, 0, 77)
        if step % 4 == 0:
            seen = zlib.crc32(collect(world, step, chance.choice([4, 100, 9_000])), seen)
        seen = zlib.crc32(repr(world.bcast((step, seen) if rank == step % size else None, step % size)).encode(), seen)
    print(f"rank {rank} saw {seen}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
