"""Names with an underscore that mpi4py.util uses of mpi4py.MPI.

``mpi4py.util`` is pure Python and runs on top of our module unchanged; these are what it needs beyond the public names.
"""

from __future__ import annotations

import threading
from typing import Any

from remesh.mpi.upper import environment
from remesh.mpi.upper.comm import Comm, Intracomm
from remesh.mpi.upper.datatype import Datatype
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.intercomm import Intercomm
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.status import Status

_TWIN = 1 << 61
"""Set in the number of a communicator under which its private twin sends."""


def comm_lock_table(comm: Comm) -> dict[Any, Any]:
    """The locks of a communicator, by key."""
    return comm._members.locks


def comm_lock(comm: Comm, key: Any = None) -> Any:
    """The lock of a communicator under a key."""
    return comm_lock_table(comm).setdefault(key, threading.Lock())


def _twin(members: Members) -> Members:
    """The same ranks under another number: for messages that must not meet those of the program."""
    return Members(members.number | _TWIN, members.ranks, members.rank, members.remote, members.local)


def _next_tag(members: Members) -> int:
    members.num_private += 1
    return members.num_private & 0x7FFF


def commctx_intra(comm: Intracomm) -> tuple[Intracomm, int]:
    """A twin of the communicator, and a tag that no other call got; all members call this."""
    members = comm._members
    return Intracomm._wrap(_twin(members)), _next_tag(members)


def commctx_inter(comm: Intercomm) -> tuple[Intercomm, int, Intracomm, bool]:
    """The same for two groups, with the local group's own communicator, and whether this is the lower group."""
    members = comm._members
    local = Intracomm._wrap(members.local)
    return Intercomm._wrap(_twin(members)), _next_tag(members), local, min(members.ranks) < min(members.peers)


def typecode(datatype: Datatype) -> str | None:
    """Character or type string of a predefined datatype, None if it has none."""
    basic = datatype._type.basic if datatype else None
    return None if basic is None else basic.code


def typealign(datatype: Datatype) -> int | None:
    """Alignment of a predefined datatype, bytes."""
    basic = datatype._type.basic if datatype else None
    return None if basic is None else basic.alignment


def set_abort_status(status: int | str | None) -> None:
    """``python -m mpi4py`` met an exception: the whole job ends with this status when the program ends."""
    environment.abort_status = status if isinstance(status, int) else 0 if status is None else 1


def handle_of(thing: Handle | Status) -> int:
    """A number for an object, good in this process."""
    if isinstance(thing, Status):
        return id(thing)
    if not isinstance(thing, Handle):
        raise TypeError(f"expecting an MPI object, got {type(thing).__name__}")
    return thing.toint()


NAMES = {
    "_set_abort_status": set_abort_status,
    "_comm_lock": comm_lock,
    "_comm_lock_table": comm_lock_table,
    "_commctx_intra": commctx_intra,
    "_commctx_inter": commctx_inter,
    "_typecode": typecode,
    "_typealign": typealign,
    "_handleof": handle_of,
}
