"""What a communicator is: a number, the world ranks of its group, and what the program hangs on it.

The number of a new communicator needs no message: it follows from the parent's number and how many constructors have
run on the parent, which is the same on all members. The lower half is told the number and the members.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh.mpi.calls.table import BY_NAME
from remesh.mpi.native import NATIVE
from remesh.mpi.upper.attributes import Attributes
from remesh.mpi.upper.link import link

WORLD, SELF = 0, 1
_MAKE, _FREE = BY_NAME["make_communicator"], BY_NAME["free_communicator"]


def number_of(*parts: int | str) -> int:
    """A number of 62 bits that follows from the parts, and two for the hidden context and for ours."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2 | 1 << 60


@dataclass(eq=False)
class Members:
    """Content of a Comm."""

    number: int
    ranks: tuple[int, ...]  # world ranks of the (local) group
    rank: int  # of this process in it
    remote: tuple[int, ...] | None = None  # world ranks of the remote group of an intercommunicator
    local: Members | None = None  # of an intercommunicator: the local group's own communicator, for its collectives
    name: str = ""
    attributes: Attributes = field(default_factory=Attributes)
    topology: Any = None
    errhandler: Any = None
    info: dict[str, str] = field(default_factory=dict)
    predefined: bool = False
    num_made: int = 0  # constructors that have run on it
    num_made_by_group: dict[Any, int] = field(default_factory=dict)
    buffer: Any = None
    num_private: int = 0  # tags that mpi4py.util has taken
    locks: dict[Any, Any] = field(default_factory=dict)
    peers: tuple[int, ...] = field(init=False)  # world ranks of those one sends to
    of_world: dict[int, int] = field(init=False)  # world rank -> rank of those one sends to

    def __post_init__(self) -> None:
        self.peers = self.ranks if self.remote is None else self.remote
        self.of_world = {world: rank for rank, world in enumerate(self.peers)}

    @property
    def hidden(self) -> int:
        """The number under which traffic of the library itself runs, apart from the program's."""
        return self.number | 1 << 62

    def next_number(self, *more: int | str) -> int:
        """The number of the next communicator made from this one; all members call this."""
        self.num_made += 1
        return number_of(self.number, self.num_made, *more)

    def next_of_group(self, key: Any) -> int:
        """How many communicators were made from it for such a key, which only some members know, this one included."""
        count = self.num_made_by_group[key] = self.num_made_by_group.get(key, 0) + 1
        return count

    def register(self) -> None:
        """Tell the lower half, so that collectives can run on it."""
        packed = struct.pack(f"<{len(self.ranks)}i", *self.ranks)
        link().ask(_MAKE, (self.number, len(self.ranks), NATIVE.address_of(packed)), keep=packed)

    def forget(self) -> None:
        """Tell the lower half that it has been freed."""
        if self.remote is None:
            link().ask(_FREE, (self.number,))
        elif self.local is not None:
            self.local.forget()


def make(parent: Members, number: int, ranks: Sequence[int]) -> Members:
    """A communicator of these world ranks, of which this process is one."""
    members = Members(number, tuple(ranks), tuple(ranks).index(parent.ranks[parent.rank]))
    members.errhandler = parent.errhandler
    members.register()
    return members
