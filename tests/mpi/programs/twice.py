"""Waits that have a request twice, an error of the program: refused, and messages go on. Runs on the library.

A real MPI may crash on this.
"""

import array

from mpi4py import MPI


def refused(wait: str, requests: list[MPI.Request]) -> None:
    try:
        getattr(MPI.Request, wait)(requests)
    except MPI.Exception as error:
        assert error.error_class in (MPI.ERR_REQUEST, MPI.ERR_IN_STATUS), error
    else:
        raise AssertionError(f"{wait} was not refused")


def main() -> None:
    comm = MPI.COMM_WORLD
    peer = 1 - comm.rank
    into = array.array("d", [0.0] * 10)
    for wait in ("Waitall", "Waitsome", "waitall"):
        for make in (comm.Irecv, comm.Recv_init):
            request = make(into, peer)
            if make == comm.Recv_init:
                request.Start()
            comm.Send(array.array("d", [float(comm.rank)] * 10), peer)
            refused(wait, [request, request])
            if request:
                request.Wait()
            assert list(into) == [float(peer)] * 10
            if request:
                request.Free()
    comm.Barrier()
    print(f"rank {comm.rank} saw 0")


main()
