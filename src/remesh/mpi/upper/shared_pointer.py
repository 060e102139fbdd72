"""The file pointer that the ranks of a file share: a number in the memory of the first rank, moved by one-sided access.

Only the first rank offers memory, so only its lower half listens for accesses; the others know where it is without a
word. A rank that has the file to itself keeps the number without any window. Source: MPI 4.1, section 14.4.4.
"""

from __future__ import annotations

from array import array

from remesh.mpi.calls.table import BY_NAME
from remesh.mpi.native import NATIVE
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.epochs import Window
from remesh.mpi.upper.link import link
from remesh.mpi.upper.op import OPS, Op
from remesh.mpi.upper.together import Comm, at_first_rank
from remesh.mpi.upper.views import byte_view
from remesh.mpi.upper.window import Win

_MAKE, _FREE, _ATTACH = BY_NAME["make_window"], BY_NAME["free_window"], BY_NAME["attach_memory"]
_ADD, _SET, _GET = OPS["SUM"], OPS["REPLACE"], OPS["NO_OP"]


class SharedPointer:
    """A position in etypes of the view; all ranks make it, and it is ready when a collective after that has ended."""

    def __init__(self, comm: Comm, position: int) -> None:
        self._comm = comm
        self._number = array("q", [position])
        self._window: Win | None = None
        if comm.Get_size() > 1:
            self._window = self._make_window()

    def _make_window(self) -> Win:
        members = self._comm._members
        view = byte_view(self._number)[0]
        base = NATIVE.address_of(view)
        if self._comm.Get_rank() == 0:
            link().ask(_MAKE, (members.number, base))
            link().ask(_ATTACH, (members.number, base, len(view)))
        size = self._comm.Get_size()
        units, sizes = (self._number.itemsize,) * size, (len(view), *[0] * (size - 1))
        window = Win._wrap(Window(members, k.WIN_FLAVOR_CREATE, view, base, units, sizes))
        window.Lock_all(k.MODE_NOCHECK)
        return window

    def _apply(self, op: Op, operand: int) -> int:
        """Change the number at once with respect to all ranks; what it was before."""
        given, found = array("q", [operand]), array("q", [0])
        if self._window is None:
            found[0] = self._number[0]
            self._number[0] = op(found[0], operand)
        else:
            self._window.Fetch_and_op(given, found, 0, 0, op)
            self._window.Flush(0)
        return found[0]

    def get(self) -> int:
        """Where it is."""
        return self._apply(_GET, 0)

    def set(self, position: int) -> None:
        """Move it; all ranks do, and it is there when this ends."""
        at_first_rank(self._comm, lambda: self._apply(_SET, position))

    def take(self, num_etypes: int) -> int:
        """Where this rank's etypes begin when ranks take theirs as they come."""
        return self._apply(_ADD, num_etypes)

    def take_in_turn(self, num_etypes: int) -> int:
        """Where this rank's etypes begin when all ranks take theirs in order of ranks; all ranks do."""
        rank, everybody = self._comm.Get_rank(), array("q", [0] * self._comm.Get_size())
        self._comm.Allgather(array("q", [num_etypes]), everybody)
        start = array("q", [self.take(sum(everybody)) if rank == 0 else 0])
        self._comm.Bcast(start)
        return start[0] + sum(everybody[:rank])

    def free(self) -> None:
        """Take the memory back, when no rank comes any more."""
        if self._window is not None and self._comm.Get_rank() == 0:
            link().ask(_FREE, (self._comm._members.number,))
