"""Collectives on buffers: one preparation for each, three forms of call.

A preparation turns MPI's arguments into an :class:`Exchange`. From it the blocking form (``Bcast``), the non-blocking
(``Ibcast``) and the persistent one (``Bcast_init``) are made, the same way for all.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from remesh.mpi.calls.table import Kind
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import (
    NOTHING,
    Blocks,
    Direct,
    Spec,
    check_alike,
    is_in_place,
    parse,
    parse_blocks,
    parse_typed_blocks,
)
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.exchange import Exchange, Folding, run_now, start
from remesh.mpi.upper.link import Landing, collect_shortly, start_collecting
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.op import OPS, Op
from remesh.mpi.upper.request import Operation, Prequest, Request, Work

SUM = OPS["SUM"]
Prepare = Callable[..., Exchange]


def is_root(m: Members, root: int) -> bool:
    """Whether this process is the one that gives to, or takes from, all."""
    if m.remote is None:
        if not 0 <= root < len(m.ranks):
            raise failure("ERR_ROOT", f"root {root} of {len(m.ranks)}")
        return root == m.rank
    if root >= len(m.remote) or root < k.ROOT or root == k.ANY_SOURCE:
        raise failure("ERR_ROOT", f"root {root} of a remote group of {len(m.remote)}")
    return root == k.ROOT


def _barrier(m: Members) -> Exchange:
    return Exchange(Kind.BARRIER)


def _bcast(m: Members, buf: Any, root: int = 0) -> Exchange:
    if is_root(m, root):
        return Exchange(Kind.BCAST, parse(buf).payload(), root=root)
    if root == k.PROC_NULL:
        return Exchange(Kind.BCAST, root=root)
    return Exchange(Kind.BCAST, landing=parse(buf).landing(), root=root)


def _own(m: Members, whole: Spec) -> memoryview:
    return whole.part(m.rank, len(m.ranks)).payload()


def _gather(m: Members, sendbuf: Any, recvbuf: Any, root: int = 0) -> Exchange:
    if not is_root(m, root):
        send = memoryview(b"") if root == k.PROC_NULL else parse(sendbuf).payload()
        return Exchange(Kind.GATHER, send, root=root)
    whole = parse(recvbuf, len(m.peers))
    send = memoryview(b"")
    if m.remote is None:
        send = _own(m, whole) if is_in_place(sendbuf) else parse(sendbuf).payload()
    return Exchange(Kind.GATHER, send, whole.landing(), root)


def _gatherv(m: Members, sendbuf: Any, recvbuf: Any, root: int = 0) -> Exchange:
    if not is_root(m, root):
        send = memoryview(b"") if root == k.PROC_NULL else parse(sendbuf).payload()
        return Exchange(Kind.GATHERV, send, root=root)
    blocks = parse_blocks(recvbuf, len(m.peers))
    send = memoryview(b"")
    if m.remote is None:
        send = blocks.parts[m.rank].payload() if is_in_place(sendbuf) else parse(sendbuf).payload()
    return Exchange(Kind.GATHERV, send, blocks.landing(), root, receive_counts=blocks.counts_bytes)


def _scatter(m: Members, sendbuf: Any, recvbuf: Any, root: int = 0) -> Exchange:
    if not is_root(m, root):
        landing = NOTHING if root == k.PROC_NULL else parse(recvbuf).landing()
        return Exchange(Kind.SCATTER, landing=landing, root=root)
    whole = parse(sendbuf, len(m.peers))
    landing = NOTHING
    if m.remote is None:
        landing = _aside(len(_own(m, whole))) if is_in_place(recvbuf) else parse(recvbuf).landing()
    return Exchange(Kind.SCATTER, whole.payload(), landing, root)


def _scatterv(m: Members, sendbuf: Any, recvbuf: Any, root: int = 0) -> Exchange:
    if not is_root(m, root):
        landing = NOTHING if root == k.PROC_NULL else parse(recvbuf).landing()
        return Exchange(Kind.SCATTERV, landing=landing, root=root)
    blocks = parse_blocks(sendbuf, len(m.peers))
    landing = NOTHING
    if m.remote is None:
        own = blocks.parts[m.rank].num_bytes
        landing = _aside(own) if is_in_place(recvbuf) else parse(recvbuf).landing()
    return Exchange(Kind.SCATTERV, blocks.payload(), landing, root, send_counts=blocks.counts_bytes)


def _aside(num_bytes: int) -> Direct:
    """A landing that nobody looks at."""
    return Direct(memoryview(bytearray(num_bytes)))


def _allgather(m: Members, sendbuf: Any, recvbuf: Any) -> Exchange:
    whole = parse(recvbuf, len(m.peers))
    send = _own(m, whole) if is_in_place(sendbuf) else parse(sendbuf).payload()
    return Exchange(Kind.ALLGATHER, send, whole.landing())


def _allgatherv(m: Members, sendbuf: Any, recvbuf: Any) -> Exchange:
    blocks = parse_blocks(recvbuf, len(m.peers))
    send = blocks.parts[m.rank].payload() if is_in_place(sendbuf) else parse(sendbuf).payload()
    return Exchange(Kind.ALLGATHERV, send, blocks.landing(), receive_counts=blocks.counts_bytes)


def _alltoall(m: Members, sendbuf: Any, recvbuf: Any) -> Exchange:
    num = len(m.peers)
    whole = parse(recvbuf, num)
    send = memoryview(bytes(whole.payload())) if is_in_place(sendbuf) else parse(sendbuf, num).payload()
    return Exchange(Kind.ALLTOALL, send, whole.landing())


def _alltoall_blocks(sendbuf: Any, blocks: Blocks, read: Callable[[Any], Blocks]) -> Exchange:
    if is_in_place(sendbuf):
        send, counts = memoryview(bytes(blocks.payload())), blocks.counts_bytes
    else:
        given = read(sendbuf)
        send, counts = given.payload(), given.counts_bytes
    return Exchange(Kind.ALLTOALLV, send, blocks.landing(), send_counts=counts, receive_counts=blocks.counts_bytes)


def _alltoallv(m: Members, sendbuf: Any, recvbuf: Any) -> Exchange:
    num = len(m.peers)
    return _alltoall_blocks(sendbuf, parse_blocks(recvbuf, num), lambda buf: parse_blocks(buf, num))


def _alltoallw(m: Members, sendbuf: Any, recvbuf: Any) -> Exchange:
    num = len(m.peers)
    return _alltoall_blocks(sendbuf, parse_typed_blocks(recvbuf, num), lambda buf: parse_typed_blocks(buf, num))


def _reduce(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Exchange:
    if root == k.PROC_NULL:
        return Exchange(Kind.GATHER, root=root)
    at_root = is_root(m, root)
    into = parse(recvbuf) if at_root else None
    mine = into if is_in_place(sendbuf) and into is not None else parse(sendbuf) if m.remote is None else None
    if mine is None:
        mine = into if into is not None else parse(sendbuf)
    if into is not None:
        check_alike(mine, into)
    landing: Landing = NOTHING if into is None else into.landing()
    real = op._real(mine.datatype) if m.remote is None else None
    if real is not None:
        return Exchange(Kind.REDUCE, mine.payload(), landing, root, op=real[0], type=real[1])
    if into is not None:
        landing = Folding(len(m.peers), into.num_bytes, _folder(op, into), landing)
    return Exchange(Kind.GATHER, mine.payload(), landing, root)


def _folder(op: Op, spec: Spec) -> Callable[[list[memoryview]], bytearray]:
    return lambda operands: op._fold(operands, spec.datatype, spec.count)


def _operands(sendbuf: Any, into: Spec) -> memoryview:
    if is_in_place(sendbuf):
        return into.payload()
    given = parse(sendbuf)
    check_alike(given, into)
    return given.payload()


def _allreduce(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Exchange:
    into = parse(recvbuf)
    send = _operands(sendbuf, into)
    real = op._real(into.datatype) if m.remote is None else None
    if real is not None:
        return Exchange(Kind.ALLREDUCE, send, into.landing(), op=real[0], type=real[1])
    return Exchange(Kind.ALLGATHER, send, Folding(len(m.peers), len(send), _folder(op, into), into.landing()))


def _reduce_scatter(
    m: Members, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
) -> Exchange:
    num = len(m.ranks)
    into = parse(recvbuf)
    if recvcounts is None and not is_in_place(sendbuf) and m.remote is None:
        recvcounts = _everybodys(m, into.count)
    counts = [int(count) for count in recvcounts] if recvcounts is not None else [into.count // num] * num
    if is_in_place(sendbuf):
        check_alike(into, Spec(into.view, into.start, sum(counts), into.datatype))
        return _reduced_share(m, into, into.head(counts[m.rank]), counts, op)
    if into.count != counts[m.rank]:
        raise ValueError(f"mismatch in receive count {into.count} and counts[{m.rank}] {counts[m.rank]}")
    whole = parse(sendbuf)
    check_alike(whole, Spec(into.view, into.start, sum(counts), into.datatype))
    return _reduced_share(m, whole, into, counts, op)


def _everybodys(m: Members, count: int) -> tuple[int, ...]:
    """What every rank says; all ranks call this."""
    whole = bytearray(8 * len(m.ranks))
    run_now(m, Exchange(Kind.ALLGATHER, memoryview(struct.pack("<q", count)), Direct(memoryview(whole))))
    return struct.unpack(f"<{len(m.ranks)}q", whole)


def _reduce_scatter_block(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Exchange:
    num = len(m.ranks)
    if is_in_place(sendbuf):
        whole = parse(recvbuf, num)
        into = whole.head(whole.count // num)
    else:
        whole, into = parse(sendbuf, num), parse(recvbuf)
        check_alike(whole, into, num)
    return _reduced_share(m, whole, into, [into.count] * num, op)


def _reduced_share(m: Members, whole: Spec, into: Spec, counts: list[int], op: Op) -> Exchange:
    send = whole.payload()
    real = op._real(whole.datatype) if m.remote is None else None
    if real is not None:
        landing = into.landing()
        return Exchange(Kind.REDUCE_SCATTER, send, landing, op=real[0], type=real[1], send_counts=tuple(counts))
    size = whole.datatype._layout.size
    first, last = sum(counts[: m.rank]) * size, sum(counts[: m.rank + 1]) * size

    def fold(operands: list[memoryview]) -> memoryview:
        return memoryview(op._fold(operands, whole.datatype, sum(counts)))[first:last]

    # Between groups the operands are the remote group's, and all of it is cut over the local one.
    return Exchange(Kind.ALLGATHER, send, Folding(len(m.peers), sum(counts) * size, fold, into.landing()))


def _scan(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Exchange:
    into = parse(recvbuf)
    send = _operands(sendbuf, into)
    real = op._real(into.datatype)
    if real is not None:
        return Exchange(Kind.SCAN, send, into.landing(), op=real[0], type=real[1])

    def fold(operands: list[memoryview]) -> bytearray:
        return op._fold(operands[: m.rank + 1], into.datatype, into.count)

    return Exchange(Kind.ALLGATHER, send, Folding(len(m.ranks), len(send), fold, into.landing()))


def _exscan(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Exchange:
    into = parse(recvbuf)
    send = _operands(sendbuf, into)
    # The first rank gets nothing and its buffer stays as it is.
    landing: Landing = into.landing() if m.rank else _aside(len(send))
    real = op._real(into.datatype)
    if real is not None:
        return Exchange(Kind.EXSCAN, send, landing, op=real[0], type=real[1])

    def fold(operands: list[memoryview]) -> bytearray:
        return op._fold(operands[: max(1, m.rank)], into.datatype, into.count)

    return Exchange(Kind.ALLGATHER, send, Folding(len(m.ranks), len(send), fold, landing))


Short = tuple[int, tuple[int, bytes], int, int, Any, Any]
"""Fields of a collective by the short way: kind, operation and types, communicator, root, what is sent and received."""
_BYTES = (0, b"")
# As plain integers: to take a member of an enumeration costs as much as half of what is left here.
_BARRIER, _BCAST, _REDUCE, _ALLREDUCE = map(int, (Kind.BARRIER, Kind.BCAST, Kind.REDUCE, Kind.ALLREDUCE))


def _short_barrier(m: Members) -> Short:
    return _BARRIER, _BYTES, m.number, 0, None, None


def _short_bcast(m: Members, buf: Any, root: int = 0) -> Short | None:
    if not 0 <= root < len(m.ranks):
        return None
    send, receive = (buf, None) if root == m.rank else (None, buf)
    return _BCAST, _BYTES, m.number, root, send, receive


def _short_reduce(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Short | None:
    real = op._op.real_by_character
    if real is None or not 0 <= root < len(m.ranks) or (root == m.rank and recvbuf is None):
        return None
    return _REDUCE, real, m.number, root, sendbuf, recvbuf if root == m.rank else None


def _short_allreduce(m: Members, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Short | None:
    real = op._op.real_by_character
    if real is None or recvbuf is None:
        return None
    return _ALLREDUCE, real, m.number, 0, sendbuf, recvbuf


_SHORT: dict[str, Callable[..., Short | None]] = {
    "Barrier": _short_barrier,
    "Bcast": _short_bcast,
    "Reduce": _short_reduce,
    "Allreduce": _short_allreduce,
}
"""Collectives of plain, small buffers on an intracommunicator; None where they leave it to the long way."""


def forms(name: str, prepare: Prepare, run: Callable[..., Any], now: Callable[..., Any]) -> dict[str, Any]:
    """The three methods of one collective, by name; ``run`` starts what ``prepare`` gives, ``now`` waits for it too."""

    shortly = _SHORT.get(name) if now is run_now else None

    @functools.wraps(prepare)
    def blocking(self: Any, *args: Any, **named: Any) -> None:
        members = self._members
        short = None if shortly is None or members.remote is not None else shortly(members, *args, **named)
        if short is None or not collect_shortly(*short):
            now(members, prepare(members, *args, **named))

    @functools.wraps(prepare)
    def started(self: Any, *args: Any, **named: Any) -> Request:
        members = self._members
        short = None if shortly is None or members.remote is not None else shortly(members, *args, **named)
        under_way = None if short is None else start_collecting(*short)
        if under_way is not None:
            return Request._wrap(Work([Operation(*under_way)]))
        return Request._wrap(run(members, prepare(members, *args, **named), blocking=False))

    @functools.wraps(prepare)
    def persistent(self: Any, *args: Any, info: Any = None, **named: Any) -> Prequest:
        members = self._members
        prepare(members, *args, **named)
        return Prequest._of(lambda: run(members, prepare(members, *args, **named), blocking=False))

    return {name: blocking, f"I{name[0].lower()}{name[1:]}": started, f"{name}_init": persistent}


EVERYWHERE: dict[str, Prepare] = {
    "Barrier": _barrier,
    "Bcast": _bcast,
    "Gather": _gather,
    "Gatherv": _gatherv,
    "Scatter": _scatter,
    "Scatterv": _scatterv,
    "Allgather": _allgather,
    "Allgatherv": _allgatherv,
    "Alltoall": _alltoall,
    "Alltoallv": _alltoallv,
    "Alltoallw": _alltoallw,
    "Reduce": _reduce,
    "Allreduce": _allreduce,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter_block,
}
"""Collectives of all communicators."""
WITHIN: dict[str, Prepare] = {"Scan": _scan, "Exscan": _exscan}
"""Collectives of intracommunicators only."""


def add_forms(
    cls: type, table: dict[str, Prepare], run: Callable[..., Any] = start, now: Callable[..., Any] = run_now
) -> None:
    """Give a class all forms of the collectives of a table."""
    for name, prepare in table.items():
        for method_name, method in forms(name, prepare, run, now).items():
            method.__name__ = method_name
            method.__qualname__ = f"{cls.__name__}.{method_name}"
            setattr(cls, method_name, method)
