"""A collective as the real MPI is asked for it: without blocking, and in the words of mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.carried.mpi.calls.table import Kind

Result = bytes | bytearray | memoryview
"""Data of a collective; a view is of a large buffer that is lent, or of the program's own."""


@dataclass(slots=True)
class CollectiveCall:
    """One collective, as the upper half asks for it; data are contiguous, in order of ranks."""

    kind: Kind
    root: int  # rank in the communicator
    op: int  # index into REAL_OPS
    type: int  # index into REAL_TYPES
    send: bytes | bytearray | memoryview
    receive_bytes: int  # what comes back; 0 where nothing does
    send_counts: Sequence[int] = ()  # bytes for each rank; elements for REDUCE_SCATTER
    receive_counts: Sequence[int] = ()  # bytes from each rank
    send_address: int = 0  # where `send` stands in the program, unchanged until the end; 0: only here


@dataclass(slots=True)
class RealCall:
    """A collective call in the words of mpi4py."""

    job: CollectiveCall
    send: list[Any]
    receive: list[Any]
    op: Any

    def start(self, comm: Any) -> Any:
        """Begin the call on a real communicator; returns MPI's request."""
        return _START[self.job.kind](self, comm)

    def of(self, buffer: list[Any], counts: Sequence[int]) -> list[Any]:
        return [buffer[0], list(counts), None, buffer[1]]


def may_end_early(job: CollectiveCall, num_members: int) -> bool:
    """Whether it may be complete on a member before another one has entered it; the same on all members.

    Not where each gets something that comes, or follows, from what every other one has.
    """
    match job.kind:
        case Kind.BARRIER:
            lacks_some = False
        case Kind.ALLGATHER | Kind.ALLTOALL | Kind.ALLREDUCE:
            lacks_some = job.receive_bytes == 0
        case Kind.ALLGATHERV:
            lacks_some = 0 in job.receive_counts
        case Kind.REDUCE_SCATTER:
            lacks_some = 0 in job.send_counts
        case _:
            lacks_some = True
    return lacks_some and num_members > 1


def extent_of(name: str, datatype: Any) -> int:
    """Bytes of a value of a basic datatype; 0 if its values have gaps."""
    # Values with an index have gaps, which differ from MPI to MPI.
    is_plain = datatype.extent == datatype.size and not name.endswith("_INT")
    return int(datatype.extent) if is_plain else 0


def _bcast(real: RealCall, comm: Any) -> Any:
    is_root = comm.Get_rank() == real.job.root
    return comm.Ibcast(real.send if is_root else real.receive, real.job.root)


def _at_root(real: RealCall, comm: Any, buffer: Any) -> Any:
    return buffer if comm.Get_rank() == real.job.root else None


_START: dict[Kind, Callable[[RealCall, Any], Any]] = {
    Kind.BARRIER: lambda r, c: c.Ibarrier(),
    Kind.BCAST: _bcast,
    Kind.GATHER: lambda r, c: c.Igather(r.send, _at_root(r, c, r.receive), r.job.root),
    Kind.GATHERV: lambda r, c: c.Igatherv(r.send, _at_root(r, c, r.of(r.receive, r.job.receive_counts)), r.job.root),
    Kind.SCATTER: lambda r, c: c.Iscatter(_at_root(r, c, r.send), r.receive, r.job.root),
    Kind.SCATTERV: lambda r, c: c.Iscatterv(_at_root(r, c, r.of(r.send, r.job.send_counts)), r.receive, r.job.root),
    Kind.ALLGATHER: lambda r, c: c.Iallgather(r.send, r.receive),
    Kind.ALLGATHERV: lambda r, c: c.Iallgatherv(r.send, r.of(r.receive, r.job.receive_counts)),
    Kind.ALLTOALL: lambda r, c: c.Ialltoall(r.send, r.receive),
    Kind.ALLTOALLV: lambda r, c: c.Ialltoallv(r.of(r.send, r.job.send_counts), r.of(r.receive, r.job.receive_counts)),
    Kind.REDUCE: lambda r, c: c.Ireduce(r.send, _at_root(r, c, r.receive), r.op, r.job.root),
    Kind.ALLREDUCE: lambda r, c: c.Iallreduce(r.send, r.receive, r.op),
    Kind.REDUCE_SCATTER: lambda r, c: c.Ireduce_scatter(r.send, r.receive, list(r.job.send_counts), r.op),
    Kind.SCAN: lambda r, c: c.Iscan(r.send, r.receive, r.op),
    Kind.EXSCAN: lambda r, c: c.Iexscan(r.send, r.receive, r.op),
}
