"""Setup of the C engine, from a real MPI and the parts of a lower half.

The engine (``_engine.c``) serves short messages and small collectives without Python. It calls the very library that
mpi4py has loaded, by the addresses of its functions, and works on the same requests and queues as the Python parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from remesh.carried.mpi.arena import ADDRESS, SIZE_BYTES
from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.calls.table import PAIR_FORMATS, REAL_OPS, REAL_TYPES
from remesh.carried.mpi.lower.collectives import Collectives
from remesh.carried.mpi.lower.exchange_pattern import SMALL_BYTES
from remesh.carried.mpi.lower.exposure import Asker
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.pace import WaitingPace
from remesh.carried.mpi.lower.requests import COLLECTIVE, RECEIVE, SEND, WINDOW, Requests
from remesh.carried.mpi.lower.transfers import MessageTransfers
from remesh.carried.mpi.lower.windows import Windows
from remesh.carried.mpi.lower.wire import PIECE_BYTES, Wire
from remesh.carried.mpi.native import NATIVE

_FUNCTIONS: Final = (
    *("Isend", "Test", "Start", "Iallgather", "Ialltoall", "Iallreduce", "Irecv", "Reduce_local", "Issend", "Improbe"),
    "Imrecv",
)
"""The functions of MPI, in the order of the engine."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of an engine, which reads the fields by their names."""

    base: int  # address of the channel
    functions: tuple[int, ...]  # addresses of _FUNCTIONS
    comm: int  # handle of the wire's communicator
    byte: int  # handle of the datatype
    ops: tuple[int, ...]  # handles of REAL_OPS
    types: tuple[int, ...]  # handles of REAL_TYPES
    extents: tuple[int, ...]  # bytes of one value of each; 0: no plain values
    pairs: tuple[int, ...]  # of those that are values with an index: the letter of the value; else 0
    rank: int
    size: int
    frame_request: int  # address of the handle of the wire's posted receive; 0: messages are looked for
    any_source: int  # MPI's number for that
    frame: int  # address of what it receives into
    by_number: Numbered[Any]  # the requests
    requests: Requests  # which the next number stands in
    next_number: int  # address of that
    posted: MutableMapping[int, list[Any]]  # the queues of receives, by communicator: Numbered, too
    arrived: MutableMapping[int, list[Any]]  # those of messages
    entered: Numbered[int]  # collectives entered, by communicator
    reals: Numbered[tuple[int, int]]  # handle and size of the communicators where nothing waits for its turn
    plans: Numbered[Numbered[bytes]]  # of the small collectives of each communicator: kind << 32 | root -> steps
    windows: Numbered[Any]  # with any of them, MPI is asked often though nothing waits
    accesses: Numbered[Any]  # under way, by request: None for those of the engine
    access_queues: Numbered[Any]  # by target: those that wait, which must not be overtaken
    owed: list[Any]  # receives that matched while closed, with what was announced
    on_message: Callable[..., None]  # something about making communicators, or the answer to a long access, has come
    make_plan: Callable[[int, int, int], None]  # add a plan: communicator, kind, root
    serve: Callable[[int], int]  # serve the request in a slot: 0 if it has its reply, or what it waits for
    serve_posted: Callable[[int, bytes], None]  # serve an access out of its ring
    tell: Callable[..., None]  # write the reply of a slot whose one operation is over
    tell_wait: Callable[[int], None]  # write the reply of a slot whose ``wait`` is over
    neighbours: bytes  # by rank: 1 where its program's memory can be reached
    arena_start: int  # address
    arena_bytes: int  # 0: there is none
    piece_bytes: int  # of a stream
    upper_spin: int
    lower_spin: int
    always_spins: bool
    eager_us: int
    patient_us: int
    shortest_us: int
    longest_us: int
    idle_us: int
    give_way_us: int
    seat: tuple[int, ...]  # cores
    word_send: str = SEND
    word_receive: str = RECEIVE
    word_collective: str = COLLECTIVE
    word_window: str = WINDOW
    asker: type[Asker] = Asker  # who has the lock of a window
    err_truncate: int = CLASSES["ERR_TRUNCATE"]
    err_other: int = CLASSES["ERR_OTHER"]
    err_request: int = CLASSES["ERR_REQUEST"]
    err_op: int = CLASSES["ERR_OP"]
    err_win: int = CLASSES["ERR_WIN"]
    err_rma_range: int = CLASSES["ERR_RMA_RANGE"]
    small_bytes: int = SMALL_BYTES


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that the engine calls for work that it leaves to Python, as fields of its setup."""

    on_message: Callable[..., None]
    serve: Callable[[int], int]
    serve_posted: Callable[[int, bytes], None]
    tell: Callable[..., None]
    tell_wait: Callable[[int], None]


def make_engine(  # noqa: PLR0913 - the parts of a lower half
    mpi: Any,
    base: int,
    wire: Wire,
    requests: Requests,
    transfers: MessageTransfers,
    collectives: Collectives,
    windows: Windows,
    pace: WaitingPace,
    callbacks: Callbacks,
    *,
    has_arena: bool,
) -> Any:
    """Make an engine for these parts."""
    types = [getattr(mpi, name) for name in REAL_TYPES]
    setup = Setup(
        base=base,
        functions=_addresses(mpi),
        comm=mpi._handleof(wire.comm),
        byte=mpi._handleof(mpi.BYTE),
        ops=tuple(mpi._handleof(getattr(mpi, name)) for name in REAL_OPS),
        types=tuple(map(mpi._handleof, types)),
        extents=collectives.extents,
        rank=wire.rank,
        size=wire.size,
        pairs=tuple(ord(PAIR_FORMATS.get(name, "=\0")[1]) for name in REAL_TYPES),
        frame_request=0 if wire.posted is None else mpi._addressof(wire.posted),
        any_source=mpi.ANY_SOURCE,
        frame=NATIVE.address_of(wire.frame),
        by_number=requests.by_number,
        posted=transfers.matching.posted_by_comm,
        arrived=transfers.matching.arrived_by_comm,
        requests=requests,
        next_number=requests.next_number_address,
        entered=collectives.entered,
        reals=collectives.reals,
        plans=collectives.plans,
        windows=windows.windows,
        accesses=windows.accesses,
        access_queues=windows.queues,
        owed=transfers.owed,
        on_message=callbacks.on_message,
        make_plan=collectives.make_plan,
        serve=callbacks.serve,
        serve_posted=callbacks.serve_posted,
        tell=callbacks.tell,
        tell_wait=callbacks.tell_wait,
        neighbours=bytes(rank in wire.neighbours for rank in range(wire.size)),
        arena_start=ADDRESS,
        arena_bytes=SIZE_BYTES if has_arena else 0,
        piece_bytes=PIECE_BYTES,
        upper_spin=pace.upper_spin,
        lower_spin=pace.lower_spin,
        always_spins=pace.always_spins,
        eager_us=pace.eager_us,
        patient_us=pace.patient_us,
        shortest_us=pace.shortest_sleep_us,
        longest_us=pace.longest_sleep_us,
        idle_us=pace.idle_sleep_us,
        give_way_us=pace.give_way_us,
        seat=pace.seat,
    )
    return NATIVE.Engine(setup)


def _addresses(mpi: Any) -> tuple[int, ...]:
    # A name is looked for in the module and in what it was linked with: the library that mpi4py uses.
    library = ctypes.CDLL(mpi.__file__)
    return tuple(ctypes.cast(getattr(library, f"MPI_{name}"), ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
