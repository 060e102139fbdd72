"""Collectives on bytes: the one engine below all buffer, object, neighbour and intercommunicator collectives.

On an intracommunicator a collective is one call of the lower half. On an intercommunicator, and between neighbours, it
is point-to-point traffic on the communicator's hidden number: each rank posts a receive for every block it gets and a
send for every block it gives. All members call collectives in the same order and messages between two ranks keep their
order, so no counting is needed. Reductions there, and those the real MPI cannot do, gather operands and fold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.mpi.calls.table import CallFlag, Kind
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import NOTHING, Direct
from remesh.mpi.upper.exceptions import numbered_failure
from remesh.mpi.upper.link import Completion, Landing, link
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.request import Operation, Work, progress

_EMPTY = memoryview(b"")


@dataclass(slots=True)
class Exchange:
    """One collective of one rank."""

    kind: Kind
    send: memoryview = _EMPTY
    landing: Landing = NOTHING
    root: int = 0  # rank, or ROOT or PROC_NULL on an intercommunicator
    send_counts: tuple[int, ...] = ()  # bytes for each rank; elements for a reduce-scatter
    receive_counts: tuple[int, ...] = ()  # bytes from each rank
    op: int = 0  # for the real MPI
    type: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        return self.send_counts + self.receive_counts


class Pieces:
    """Lands blocks from many ranks in one landing."""

    def __init__(self, landing: Landing, sizes: Sequence[int]) -> None:
        self._landing = landing
        self._whole = bytearray(sum(sizes))
        self.blocks = []
        position = 0
        view = memoryview(self._whole)
        for size in sizes:
            self.blocks.append(Direct(view[position : position + size]))
            position += size

    def finish(self) -> None:
        """All blocks are there: hand them on."""
        self._landing.put(memoryview(self._whole))
        self._landing.finish(len(self._whole))


def start(members: Members, exchange: Exchange, *, blocking: bool) -> Work:
    """Start a collective; the work is over at once if it is blocking on an intracommunicator."""
    if members.remote is not None:
        return _between_groups(members, exchange)
    flags = CallFlag.BLOCKING if blocking else 0
    fields = (flags, exchange.kind, exchange.op, exchange.type, members.number, exchange.root)
    ended = link().collective(fields, exchange.counts, exchange.send, exchange.landing)
    keep = None if blocking else (exchange.send, exchange.landing)
    return Work([Operation(ended, exchange.landing, keep)])


def run_now(members: Members, exchange: Exchange) -> None:
    """A blocking collective; on an intracommunicator the shortest way there is."""
    if members.remote is not None:
        work = _between_groups(members, exchange)
        progress([work], blocking=True, every=True)
        error = work.conclude()
    else:
        fields = (CallFlag.BLOCKING, exchange.kind, exchange.op, exchange.type, members.number, exchange.root)
        ended = link().collective(fields, exchange.counts, exchange.send, exchange.landing)
        error = ended.error if isinstance(ended, Completion) else 0
    if error:
        raise numbered_failure(error, f"in {exchange.kind.name}")


def send_block(members: Members, peer: int, block: memoryview, tag: int) -> Operation:
    """Give a block to a peer, by world rank."""
    number = link().send(0, members.hidden, peer, tag, block)
    return Operation(number, None, block)


def receive_block(members: Members, peer: int, landing: Landing, tag: int) -> Operation:
    """Take a block from a peer, by world rank."""
    return Operation(link().receive(0, members.hidden, peer, tag, landing), landing, landing)


def swap(
    members: Members,
    sends: Sequence[tuple[int, memoryview]],
    receives: Sequence[tuple[int, int]],
    landing: Landing,
) -> Work:
    """Give blocks to peers and take blocks of known sizes from peers (world ranks)."""
    pieces = Pieces(landing, [size for _, size in receives])
    taken = [receive_block(members, peer, block, 0) for (peer, _), block in zip(receives, pieces.blocks, strict=True)]
    given = [send_block(members, peer, block, 0) for peer, block in sends]
    return Work([*taken, *given], finish=pieces.finish if receives else None)


def cut(view: memoryview, counts: Sequence[int]) -> list[memoryview]:
    """Blocks of these sizes, one after another."""
    blocks, position = [], 0
    for count in counts:
        blocks.append(view[position : position + count])
        position += count
    return blocks


def _between_groups(members: Members, exchange: Exchange) -> Work:
    """The same collectives between the two groups of an intercommunicator. Source: MPI 4.1, section 6.2.2."""
    peers = members.peers
    kind, send, landing, root = exchange.kind, exchange.send, exchange.landing, exchange.root
    num = len(peers)
    even = [landing.capacity // num] * num
    if kind == Kind.BARRIER:
        return swap(members, [(peer, _EMPTY) for peer in peers], [(peer, 0) for peer in peers], NOTHING)
    if kind in (Kind.ALLGATHER, Kind.ALLGATHERV):
        sizes = exchange.receive_counts or even
        return swap(members, [(p, send) for p in peers], list(zip(peers, sizes, strict=True)), landing)
    if kind in (Kind.ALLTOALL, Kind.ALLTOALLV):
        blocks = cut(send, exchange.send_counts or [len(send) // num] * num)
        sizes = exchange.receive_counts or even
        return swap(members, list(zip(peers, blocks, strict=True)), list(zip(peers, sizes, strict=True)), landing)
    if root == k.PROC_NULL:
        return Work([])
    if kind == Kind.BCAST:
        if root == k.ROOT:
            return swap(members, [(peer, send) for peer in peers], [], NOTHING)
        return swap(members, [], [(peers[root], landing.capacity)], landing)
    if kind in (Kind.GATHER, Kind.GATHERV):
        if root != k.ROOT:
            return swap(members, [(peers[root], send)], [], NOTHING)
        return swap(members, [], list(zip(peers, exchange.receive_counts or even, strict=True)), landing)
    assert kind in (Kind.SCATTER, Kind.SCATTERV), f"{kind.name} between groups is gathered and folded"
    if root == k.ROOT:
        blocks = cut(send, exchange.send_counts or [len(send) // num] * num)
        return swap(members, list(zip(peers, blocks, strict=True)), [], NOTHING)
    return swap(members, [], [(peers[root], landing.capacity)], landing)


class Folding:
    """A landing for the operands of all ranks, which are folded and handed on."""

    def __init__(self, num_operands: int, size: int, fold: Callable[[list[memoryview]], Any], landing: Landing) -> None:
        self._whole = bytearray(num_operands * size)
        self._inner = Direct(memoryview(self._whole))
        self._sizes = [size] * num_operands
        self._fold, self._landing = fold, landing
        self.capacity, self.address = self._inner.capacity, self._inner.address

    def put(self, data: memoryview) -> None:
        self._inner.put(data)

    def finish(self, num_bytes: int) -> None:
        folded = memoryview(self._fold(cut(memoryview(self._whole), self._sizes)))
        self._landing.put(folded)
        self._landing.finish(len(folded))
