"""Communicators of groups that come from sessions, of one group and of two; prints what each rank saw.

``python groups.py NUM_ROUNDS``, on an even number of ranks.
"""

from __future__ import annotations

import sys

from mpi4py import MPI


def halves(world: MPI.Group) -> tuple[MPI.Group, MPI.Group]:
    """The half that this rank is in, and the other one."""
    lower = world.Range_incl([(0, world.size // 2 - 1, 1)])
    upper = world.Difference(world, lower)
    return (lower, upper) if lower.rank != MPI.UNDEFINED else (upper, lower)


def main(num_rounds: int) -> None:
    """Sums within a half, and between the halves, on communicators made anew in each round."""
    session = MPI.Session.Init()
    names = [session.Get_nth_pset(n) for n in range(session.Get_num_psets())]
    world = session.Create_group("mpi://WORLD")
    alone = MPI.Group.Create_from_session_pset(session, "mpi://SELF")
    assert names == ["mpi://WORLD", "mpi://SELF"]
    assert session.Get_pset_info("mpi://WORLD").Get("mpi_size") == str(world.size)
    assert (alone.size, alone.rank) == (1, 0)
    mine, others = halves(world)
    seen = 0
    for _ in range(num_rounds):
        within = MPI.Intracomm.Create_from_group(mine, "within")
        # Only the leader of a half knows the other one.
        known = others if within.rank == 1 else MPI.GROUP_EMPTY
        between = MPI.Intercomm.Create_from_groups(mine, 1, known, 0, "between")
        assert between.remote_group.Compare(others) == MPI.IDENT
        seen = within.allreduce(seen + world.rank + 1) + between.allreduce(world.rank) % 1000
        between.Free()
        within.Free()
    session.Finalize()
    print(f"rank {world.rank} saw {seen}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
