"""What may not be done to a window is refused by its error class, and the window works on. Runs on the library.

A real MPI may crash on much of this.
"""

import array
from collections.abc import Callable

from mpi4py import MPI


def refused(error_class: int, call: Callable[[], object]) -> str:
    try:
        call()
    except MPI.Exception as error:
        assert error.error_class == error_class, error
        return str(error)
    raise AssertionError(f"not refused: {MPI.Get_error_string(error_class)}")


def main() -> None:
    comm = MPI.COMM_WORLD
    peer = (comm.rank + 1) % comm.size
    window = MPI.Win.Allocate(80, 8, comm=comm)
    ten, result = array.array("q", range(10)), array.array("q", [-1] * 10)
    refused(MPI.ERR_RMA_SYNC, lambda: window.Put(ten, peer))
    refused(MPI.ERR_RMA_SYNC, lambda: window.Unlock(peer))
    refused(MPI.ERR_RMA_SYNC, lambda: window.Flush(peer))
    refused(MPI.ERR_RMA_SYNC, window.Complete)
    refused(MPI.ERR_RMA_SYNC, window.Wait)
    refused(MPI.ERR_RMA_SYNC, window.Unlock_all)
    refused(MPI.ERR_LOCKTYPE, lambda: window.Lock(peer, 77))
    refused(MPI.ERR_RANK, lambda: window.Lock(comm.size))
    refused(MPI.ERR_RMA_FLAVOR, lambda: window.Attach(ten))
    window.Lock(peer)
    refused(MPI.ERR_RMA_SYNC, lambda: window.Lock(peer))
    refused(MPI.ERR_RMA_SYNC, window.Lock_all)
    # Errors of the target come with the call that waits for the access.
    window.Put(ten, peer, 1)
    said = refused(MPI.ERR_RMA_RANGE, lambda: window.Flush(peer))
    assert f"Put: 80 bytes from displacement 1 (of 8 bytes) on at rank {peer}, which gave 80 bytes" in said, said
    window.Get(result, peer, -1)
    refused(MPI.ERR_RMA_RANGE, lambda: window.Flush(peer))
    request = window.Rput(ten, peer, 1 << 40)
    refused(MPI.ERR_RMA_RANGE, request.Wait)
    mine = MPI.Op.Create(lambda a, b, t: None)
    refused(MPI.ERR_OP, lambda: window.Accumulate(ten, peer, op=mine))
    refused(MPI.ERR_OP, lambda: window.Accumulate([bytearray(80), MPI.FLOAT], peer, op=MPI.BAND))
    refused(MPI.ERR_TRUNCATE, lambda: window.Put(ten, peer, (0, 9, MPI.INT64_T)))
    window.Put(ten, peer)
    window.Get(result, peer)
    window.Unlock(peer)
    assert result == ten
    dynamic = MPI.Win.Create_dynamic(comm=comm)
    dynamic.Attach(ten)
    refused(MPI.ERR_RMA_ATTACH, lambda: dynamic.Attach(memoryview(ten)[3:5]))
    places = comm.allgather(MPI.Get_address(ten))
    dynamic.Detach(ten)
    refused(MPI.ERR_RMA_ATTACH, lambda: dynamic.Detach(ten))
    comm.Barrier()
    dynamic.Lock_all()
    dynamic.Put(ten, peer, places[peer])
    refused(MPI.ERR_RMA_RANGE, dynamic.Unlock_all)
    refused(MPI.ERR_RMA_SYNC, dynamic.Unlock_all)
    for one in (window, dynamic):
        one.Free()
        refused(MPI.ERR_WIN, one.Get_group)
    refused(MPI.ERR_DISP, lambda: MPI.Win.Allocate_shared(8, 0, comm=comm))
    refused(MPI.ERR_NO_MEM, lambda: MPI.Win.Allocate_shared(1 << 52, comm=comm))
    alone = MPI.Win.Allocate_shared(8)
    memory, unit = alone.Shared_query(0)
    assert (len(memory), unit, alone.flavor) == (8, 1, MPI.WIN_FLAVOR_SHARED)
    alone.Free()
    comm.Barrier()
    print(f"rank {comm.rank} saw 0", flush=True)


if __name__ == "__main__":
    main()
