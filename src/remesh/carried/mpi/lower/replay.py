"""Communicators that a new lower half makes before its program goes on, and their order.

Those that had been made before, so that the program does not wait for each of them once more, one by one. Making one
blocks until all members do the same, so they must agree on the list. Nearly everything that they need for it is known
to each: one was made when all members had entered its first collective. But one member may have freed what another
still has. So every rank tells all others what it would make, and

    made        what as many ranks have named as it has members
    in order    of number and group, the same everywhere: the first of what is left can always be made

Nobody waits in turn for anyone who waits for him: of all that is not made yet, all members of the first have it first.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

_FORM: Final = struct.Struct("<Qii")


@dataclass(frozen=True, slots=True, order=True)
class Named:
    """The name of a communicator, which is the same on all its members and on no other."""

    number: int
    first: int  # world rank of its rank 0: disjoint groups may have one number
    num_members: int


def choose_common(named: Iterable[Named], told: Iterable[Named]) -> list[Named]:
    """Choose what all members named of this rank's ``named``, in the order of making; ``told`` is what all ranks named.

    >>> both, alone = Named(7, first=0, num_members=2), Named(9, first=0, num_members=2)
    >>> choose_common([alone, both], [alone, both, both])
    [Named(number=7, first=0, num_members=2)]
    """
    times = Counter(told)
    return sorted(each for each in named if times[each] == each.num_members)


def send_all(mpi: Any, comm: Any, named: Iterable[Named]) -> list[Named]:
    """Gather the names of all ranks of a real communicator. All of them call this."""
    own = b"".join(_FORM.pack(each.number, each.first, each.num_members) for each in named)
    return [Named(*fields) for fields in _FORM.iter_unpack(join_all(mpi, comm, own))]


def join_all(mpi: Any, comm: Any, own: bytes) -> bytearray:
    """Gather the bytes of all ranks of a real communicator, in their order. All of them call this."""
    lengths = array("i", bytes(4 * comm.Get_size()))
    comm.Allgather([array("i", [len(own)]), mpi.INT], [lengths, mpi.INT])
    room = bytearray(sum(lengths))
    comm.Allgatherv([own, mpi.BYTE], [room, list(lengths), None, mpi.BYTE])
    return room
