"""Windows: memory of this process that other ranks read and write.

The memory stays in the program, and with it in the image: after a restart everything is at the same address. The lower
half knows a window's number, base and memory, and serves the others' accesses while the program computes.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

from remesh.mpi.calls.table import BY_NAME
from remesh.mpi.native import NATIVE
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.accesses import Accesses
from remesh.mpi.upper.attributes import WithAttributes
from remesh.mpi.upper.buffers import BottomType
from remesh.mpi.upper.comm import COMM_NULL, Comm, Intracomm, predefined
from remesh.mpi.upper.epochs import Epochs, Window
from remesh.mpi.upper.errhandling import WithErrhandler
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.group import Group
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.info import INFO_NULL, Info, WithInfo
from remesh.mpi.upper.link import link
from remesh.mpi.upper.membership import make
from remesh.mpi.upper.memory import buffer
from remesh.mpi.upper.objects import allgather
from remesh.mpi.upper.views import byte_view

_MAKE, _FREE = BY_NAME["make_window"], BY_NAME["free_window"]
_ATTACH, _DETACH = BY_NAME["attach_memory"], BY_NAME["detach_memory"]


class Win(Epochs, Accesses, WithErrhandler, WithInfo, WithAttributes, Handle, NATIVE.Exporter):  # type: ignore[misc]  # a class by all means
    """Memory of all ranks of a communicator that each of them may access."""

    __slots__ = ()

    @property
    def _window(self) -> Window:  # type: ignore[override]  # a plain annotation in the mixins
        if self._h is None:
            raise failure("ERR_WIN", "the window is null or has been freed")
        window: Window = self._h
        return window

    _content = _window

    # Making them; all members call this.

    @classmethod
    def _make(cls, flavor: int, memory: memoryview, disp_unit: int, info: Info, comm: Comm | None) -> Self:
        parent = predefined()[1] if comm is None else comm
        if not isinstance(parent, Intracomm) or parent == COMM_NULL:
            raise failure("ERR_COMM", "windows are made on communicators of one group")
        if disp_unit <= 0:
            raise failure("ERR_DISP", f"a displacement unit of {disp_unit} bytes, expected a positive one")
        members = make(parent._members, parent._members.next_number("window"), parent._members.ranks)
        base = NATIVE.address_of(memory) if len(memory) else 0
        link().ask(_MAKE, (members.number, base))
        if len(memory):
            link().ask(_ATTACH, (members.number, base, len(memory)))
        # Nobody accesses this rank before everybody knows what everybody gives.
        shares = allgather(members, (disp_unit, len(memory)))
        units, sizes = tuple(unit for unit, _ in shares), tuple(size for _, size in shares)
        window = Window(members, flavor, memory, base, units, sizes)
        window.info = dict(info.items())
        return cls._wrap(window)

    @classmethod
    def Create(cls, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None) -> Self:
        is_nothing = memory is None or isinstance(memory, BottomType)
        view = memoryview(bytearray()) if is_nothing else byte_view(memory)[0]
        if len(view) and view.readonly:
            raise BufferError("Create: the window's memory is read-only")
        return cls._make(k.WIN_FLAVOR_CREATE, view, disp_unit, info, comm)

    @classmethod
    def Allocate(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None) -> Self:
        return cls._make(k.WIN_FLAVOR_ALLOCATE, _fresh(size), disp_unit, info, comm)

    @classmethod
    def Allocate_shared(cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None) -> Self:
        if comm is not None and comm.Get_size() > 1:
            raise NotImplementedError(
                f"MPI.Win.Allocate_shared on {comm.Get_size()} ranks: ranks that share memory may come apart at a "
                "restart; use Allocate with Put and Get"
            )
        return cls._make(k.WIN_FLAVOR_SHARED, _fresh(size), disp_unit, info, comm)

    @classmethod
    def Create_dynamic(cls, info: Info = INFO_NULL, comm: Any = None) -> Self:
        return cls._make(k.WIN_FLAVOR_DYNAMIC, memoryview(bytearray()), 1, info, comm)

    def _dynamic(self, call: str) -> Window:
        window = self._window
        if window.flavor != k.WIN_FLAVOR_DYNAMIC:
            raise failure("ERR_RMA_FLAVOR", f"{call}: the window was not made by Create_dynamic")
        return window

    def Attach(self, memory: Any) -> None:
        window = self._dynamic("Attach")
        view = byte_view(memory)[0]
        if not len(view):
            return
        if view.readonly:
            raise BufferError("Attach: the memory is read-only")
        address = NATIVE.address_of(view)
        end = address + len(view)
        if any(address < start + len(other) and start < end for start, other in window.attached.items()):
            raise failure("ERR_RMA_ATTACH", f"Attach: {len(view)} bytes at {address:#x} are attached already, in part")
        window.attached[address] = view
        link().ask(_ATTACH, (window.members.number, address, len(view)))

    def Detach(self, memory: Any) -> None:
        window = self._dynamic("Detach")
        view = byte_view(memory)[0]
        if not len(view):
            return
        address = NATIVE.address_of(view)
        if window.attached.pop(address, None) is None:
            raise failure("ERR_RMA_ATTACH", f"Detach: nothing at {address:#x} is attached")
        link().ask(_DETACH, (window.members.number, address))

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """The memory of a rank as far as this process has it itself: its own; nothing of another's."""
        window = self._window
        if window.flavor == k.WIN_FLAVOR_DYNAMIC:
            raise failure("ERR_RMA_FLAVOR", "Shared_query: the window was made by Create_dynamic")
        wanted = 0 if rank == k.PROC_NULL else self._rank(rank)
        is_own = wanted == window.members.rank
        return buffer._of(window.memory if is_own and window.memory else _nowhere(), self), window.units[wanted]

    def Free(self) -> None:
        window = self._window
        self._delete_attributes()
        window.flush(list(window.pending))
        window.barrier()
        link().ask(_FREE, (window.members.number,))
        window.members.forget()
        self._h = None

    # Its memory.

    def tomemory(self) -> Any:
        """The memory that this rank gives, as an MPI.buffer."""
        return buffer._of(self._window.memory or _nowhere(), self)

    def __buffer__(self, flags: int) -> memoryview:
        return self._window.memory

    @property
    def attrs(self) -> tuple[int, int, int]:
        """Base address, bytes, and displacement unit."""
        window = self._window
        return window.base, len(window.memory), window.units[window.members.rank]

    def _predefined_attribute(self, keyval: int) -> Any:
        base, size, unit = self.attrs
        known = {
            k.WIN_BASE: base,
            k.WIN_SIZE: size,
            k.WIN_DISP_UNIT: unit,
            k.WIN_CREATE_FLAVOR: self._window.flavor,
            k.WIN_MODEL: k.WIN_UNIFIED,
        }
        return known[keyval] if keyval in known else super()._predefined_attribute(keyval)

    flavor = property(lambda self: self._window.flavor)
    model = property(lambda self: self._predefined_attribute(k.WIN_MODEL))

    # Groups, names, info, errors.

    def Get_group(self) -> Group:
        members = self._window.members
        return Group._of(members.ranks, members.ranks[members.rank])

    group = property(Get_group)
    group_size = property(lambda self: len(self._window.members.ranks))
    group_rank = property(lambda self: self._window.members.rank)

    def Get_name(self) -> str:
        return "MPI_WIN_NULL" if self._h is None else self._window.name

    def Set_name(self, name: str) -> None:
        self._window.name = name

    name = property(Get_name, Set_name)


def _fresh(size: int) -> memoryview:
    if size < 0:
        raise failure("ERR_SIZE", f"a window of {size} bytes")
    return memoryview(bytearray(size))


def _nowhere() -> memoryview:
    """No bytes, at address 0, as MPI shows them."""
    return memoryview((ctypes.c_char * 0).from_address(0)).cast("B")


WIN_NULL = Win()
