"""Message buffers as programs write them: ``data``, ``[data, type]``, ``[data, count, type]``, ...

A :class:`Spec` is one run of elements, a :class:`Blocks` one run for every rank. Both give the bytes to send as one
contiguous view (in place where the datatype is dense, else packed), and a landing for what is received.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable
from typing import Any

from remesh.mpi.calls.table import PARCEL
from remesh.mpi.native import NATIVE
from remesh.mpi.upper.addresses import memory_at
from remesh.mpi.upper.basic_types import name_of_code
from remesh.mpi.upper.constants import PROC_NULL
from remesh.mpi.upper.datatype import PREDEFINED, Datatype
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.views import byte_view


class _Constant(int):
    """BOTTOM and IN_PLACE: integers with a name."""

    _name: str

    _only: _Constant | None = None

    def __new__(cls, name: str = "", value: int = 0) -> _Constant:
        if cls._only is None:
            cls._only = super().__new__(cls, value)
            cls._only._name = name
        return cls._only

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


class BottomType(_Constant):
    """Type of BOTTOM: displacements of the datatype are absolute addresses."""


class InPlaceType(_Constant):
    """Type of IN_PLACE: the data stand in the receive buffer."""


class BufferAutomaticType(_Constant):
    """Type of BUFFER_AUTOMATIC: buffered sends need no buffer of the program's."""


BOTTOM = BottomType("BOTTOM", 0)
IN_PLACE = InPlaceType("IN_PLACE", -1)
BUFFER_AUTOMATIC = BufferAutomaticType("BUFFER_AUTOMATIC", 2)


class Direct:
    """Payload lands in place."""

    __slots__ = ("address", "capacity", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.capacity = len(view)
        self.address: int = NATIVE.address_of(view) if self.capacity else 0

    def put(self, data: memoryview) -> None:
        self.view[: len(data)] = data

    def finish(self, num_bytes: int) -> None:
        pass


class Aside:
    """Payload lands in a buffer beside, and is put to its places from there."""

    __slots__ = ("_places", "_whole", "address", "capacity")

    def __init__(self, places: list[Spec]) -> None:
        self._places = places
        self.capacity = sum(place.num_bytes for place in places)
        self._whole = bytearray(self.capacity)
        self.address: int = NATIVE.address_of(self._whole) if self.capacity else 0

    def put(self, data: memoryview) -> None:
        self._whole[: len(data)] = data

    def finish(self, num_bytes: int) -> None:
        whole = memoryview(self._whole)[:num_bytes]
        for place in self._places:
            place.unpack(whole[: place.num_bytes])
            whole = whole[place.num_bytes :]


class Parcel:
    """Payload of whatever size, kept as bytes."""

    __slots__ = ("data",)
    address = 0
    capacity = PARCEL

    def __init__(self) -> None:
        self.data: bytes = b""

    def put(self, data: memoryview) -> None:
        self.data = bytes(data)

    def finish(self, num_bytes: int) -> None:
        pass


class Nothing:
    """No payload."""

    __slots__ = ()
    address = 0
    capacity = 0

    def put(self, data: memoryview) -> None:
        pass

    def finish(self, num_bytes: int) -> None:
        pass


NOTHING = Nothing()


class Spec:
    """``count`` elements of a datatype that begin at byte ``start`` of a view."""

    __slots__ = ("count", "datatype", "start", "view")

    def __init__(self, view: memoryview, start: int, count: int, datatype: Datatype) -> None:
        self.view, self.start, self.count, self.datatype = view, start, count, datatype
        if count < 0:
            raise ValueError(f"message: negative count {count}")

    @property
    def num_bytes(self) -> int:
        return self.count * self.datatype._layout.size

    def payload(self) -> memoryview:
        """The data as one contiguous view; in place where that can be."""
        layout = self.datatype._layout
        if layout.is_dense:
            return self.view[self.start : self.start + self.count * layout.size]
        return memoryview(layout.pack(self.view, self.start, self.count))

    def landing(self) -> Direct | Aside:
        """Where received data go."""
        if self.view.readonly:
            raise BufferError("message: the receive buffer is read-only")
        if self.datatype._layout.is_dense:
            return Direct(self.payload())
        return Aside([self])

    def unpack(self, packed: memoryview) -> None:
        """Put packed data to their places."""
        layout = self.datatype._layout
        if layout.is_dense:
            self.view[self.start : self.start + len(packed)] = packed
        else:
            layout.unpack(packed, self.view, self.start)

    def part(self, index: int, num_parts: int) -> Spec:
        """One of equal parts, in order."""
        share = self.count // num_parts
        return Spec(self.view, self.start + index * share * self.datatype._layout.extent, share, self.datatype)

    def head(self, count: int) -> Spec:
        """The first elements."""
        return Spec(self.view, self.start, count, self.datatype)


class Blocks:
    """One run of elements for each rank; runs may have gaps between them, and types of their own."""

    def __init__(self, parts: list[Spec]) -> None:
        self.parts = parts

    @property
    def counts_bytes(self) -> tuple[int, ...]:
        return tuple(part.num_bytes for part in self.parts)

    @property
    def _is_run(self) -> bool:
        end = None
        for part in self.parts:
            if not part.datatype._layout.is_dense or part.view is not self.parts[0].view:
                return False
            if part.count:
                if end is not None and part.start != end:
                    return False
                end = part.start + part.num_bytes
        return True

    def _run(self) -> memoryview:
        start = next((part.start for part in self.parts if part.count), 0)
        return self.parts[0].view[start : start + sum(self.counts_bytes)] if self.parts else memoryview(b"")

    def payload(self) -> memoryview:
        """The data of all, in order of ranks, as one contiguous view."""
        if self._is_run:
            return self._run()
        return memoryview(b"".join(part.payload() for part in self.parts))

    def landing(self) -> Direct | Aside:
        """Where the data of all go."""
        if self.parts and self.parts[0].view.readonly:
            raise BufferError("message: the receive buffer is read-only")
        return Direct(self._run()) if self._is_run else Aside(self.parts)


def _as_datatype(given: Any) -> Datatype:
    if isinstance(given, Datatype):
        return given
    name = name_of_code(given) if isinstance(given, str) else None
    if name is None:
        raise KeyError(f"message: cannot map {given!r} to MPI datatype")
    return PREDEFINED[name]


def _datatype_of(form: str | None) -> Datatype:
    """The datatype of the elements of a buffer, None being bytes."""
    if form is None:
        return PREDEFINED["BYTE"]
    if form[0] in _FOREIGN_ORDERS:
        raise BufferError(f"message: format {form!r} has another byte order than this machine; name a datatype")
    name = name_of_code(form.lstrip(_OWN_ORDERS))
    if name is None:
        raise KeyError(f"message: no MPI datatype for a buffer of format {form!r}; name one: [data, datatype]")
    return PREDEFINED[name]


_OWN_ORDERS, _FOREIGN_ORDERS = ("@=<", ">!") if sys.byteorder == "little" else ("@=>!", "<")


def _is_type(given: Any) -> bool:
    return isinstance(given, (Datatype, str))


def _base(buffer: Any, datatype: Any) -> tuple[memoryview, Datatype]:
    """View and datatype; the view of nothing, and of all memory, is empty."""
    if buffer is None or isinstance(buffer, BottomType):
        return memoryview(bytearray()), _as_datatype(datatype)
    view, form = byte_view(buffer)
    return view, _datatype_of(form) if datatype is None else _as_datatype(datatype)


def _all_memory(datatype: Datatype, count: int, address: int = 0) -> tuple[memoryview, int]:
    """The memory that elements at an address touch, and where they begin in it."""
    low, high = datatype._layout.span(count)
    return memory_at(address + low, high - low), -low


def is_in_place(message: Any) -> bool:
    """Whether the data stand in the other buffer."""
    return message is None or isinstance(message, InPlaceType)


def _split(message: Any, pairs: Any) -> tuple[Any, Any, Any, Any]:
    """Buffer, count, displacement and datatype; the two in the middle may stand together in one of ``pairs``."""
    if not isinstance(message, (list, tuple)):
        if message is None:
            raise TypeError("message: expecting buffer or list/tuple, got None")
        return message, None, None, None
    if not 2 <= len(message) <= 4:
        raise ValueError(f"message: expecting 2 to 4 items, got {len(message)}")
    buffer, count, *rest = message
    if len(rest) == 2:
        return buffer, count, rest[0], rest[1]
    datatype = rest[0] if rest else None
    if not rest and _is_type(count):
        return buffer, None, None, count
    count, displacement = count if isinstance(count, pairs) else (count, None)
    return buffer, count, displacement, datatype


def parse(message: Any, num_blocks: int = 1) -> Spec:
    """One run of elements; a count that is named is that of one of ``num_blocks``.

    Raises:
        TypeError, ValueError, KeyError, BufferError: where mpi4py raises them; and what does not fit into the buffer.
    """
    buffer, count, displacement, datatype = _split(message, (list, tuple))
    view, kind = _base(buffer, datatype)
    start = 0 if displacement is None else _start_of(operator.index(displacement), view, kind)
    if count is None:
        return Spec(view, start, _inferred(len(view) - start, kind, num_blocks), kind)
    count = operator.index(count) * num_blocks
    if isinstance(buffer, BottomType):
        whole, start = _all_memory(kind, count)
        return Spec(whole, start, count, kind)
    if count > 0 and buffer is None:
        raise ValueError(f"message: buffer is None but count is {count}")
    return _fitted(view, count, start, kind)


def parse_for(peer: int, message: Any, num_blocks: int = 1) -> Spec:
    """What is sent to or received from a rank; what goes nowhere is not looked at."""
    return parse(message, num_blocks) if peer != PROC_NULL else Spec(memoryview(bytearray()), 0, 0, PREDEFINED["BYTE"])


def check_alike(send: Spec, receive: Spec, num_blocks: int = 1) -> None:
    """Of a reduction both buffers have one datatype, and one count (of a block of what is sent)."""
    if send.datatype != receive.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if send.count // num_blocks != receive.count:
        raise ValueError(f"mismatch in send count {send.count // num_blocks} and receive count {receive.count}")


def _start_of(displacement: int, view: memoryview, datatype: Datatype) -> int:
    """Byte at which so many elements from the beginning of a buffer stand."""
    if displacement < 0:
        raise ValueError(f"message: negative displacement {displacement}")
    if not displacement:
        return 0
    extent = _positive_extent(datatype, "handle displacement")
    if displacement * extent > len(view):
        raise ValueError(f"message: displacement {displacement} out of bounds, the buffer has {len(view) // extent}")
    return displacement * extent


def _positive_extent(datatype: Datatype, purpose: str) -> int:
    if not datatype:
        raise ValueError(f"message: cannot {purpose}, datatype is null")
    extent = datatype._layout.extent
    if extent <= 0:
        raise ValueError(f"message: cannot {purpose}, datatype extent {extent}, expected a positive one")
    return extent


def _inferred(num_bytes: int, datatype: Datatype, num_blocks: int = 1) -> int:
    """How many elements so many bytes are."""
    if not num_bytes:
        return 0
    extent = _positive_extent(datatype, "infer count")
    count, rest = divmod(num_bytes, extent)
    if rest:
        raise ValueError(f"message: cannot infer count, {num_bytes} bytes are no multiple of the extent {extent}")
    if num_blocks > 1 and count % num_blocks:
        raise ValueError(f"message: cannot infer count, {count} entries are no multiple of {num_blocks} blocks")
    return count


def _fitted(view: memoryview, count: int, start: int, datatype: Datatype) -> Spec:
    low, high = datatype._layout.span(count)
    if start + low < 0 or start + high > len(view):
        raise ValueError(f"message: buffer of {len(view)} bytes is too small for {count} elements from byte {start}")
    return Spec(view, start, count, datatype)


def _per_rank(given: Any, num_ranks: int, of_one: Callable[[int, int], int]) -> list[int]:
    """One number for each rank, out of a sequence or of one number."""
    try:
        one = operator.index(given)
    except TypeError:
        numbers = [operator.index(number) for number in given]
        if len(numbers) != num_ranks:
            raise ValueError(f"message: expecting {num_ranks} items, got {len(numbers)}") from None
        return numbers
    return [of_one(one, rank) for rank in range(num_ranks)]


def parse_blocks(message: Any, num_ranks: int) -> Blocks:
    """One run of elements for each rank; the first ranks get one more each where the buffer cannot be shared evenly.

    Raises:
        TypeError, ValueError, KeyError, BufferError: as :func:`parse`.
    """
    buffer, counts, displacements, datatype = _split(message, (tuple,))
    view, kind = _base(buffer, datatype)
    if counts is None:
        share, rest = divmod(_inferred(len(view), kind), num_ranks or 1)
        counts = [share + (rank < rest) for rank in range(num_ranks)]
    else:
        counts = _per_rank(counts, num_ranks, lambda one, _: one)
    if displacements is None:
        displacements = [0, *itertools.accumulate(counts)][:num_ranks]
    else:
        displacements = _per_rank(displacements, num_ranks, operator.mul)
    if isinstance(buffer, BottomType) and any(counts):
        raise failure("ERR_BUFFER", "message: BOTTOM with counts for each rank; use Alltoallw")
    extent = kind._layout.extent
    return Blocks([_fitted(view, n, d * extent, kind) for n, d in zip(counts, displacements, strict=True)])


def parse_typed_blocks(message: Any, num_ranks: int) -> Blocks:
    """One run of elements for each rank, each of a datatype of its own, displacements in bytes."""
    if not 2 <= len(message) <= 4:
        raise ValueError(f"message: expecting 2 to 4 items, got {len(message)}")
    buffer, *rest, given = message
    counts, displacements = rest[0] if len(rest) == 1 else rest or (None, None)
    types = [_as_datatype(one) for one in given]
    if len(types) != num_ranks:
        raise ValueError(f"message: expecting {num_ranks} datatypes, got {len(types)}")
    if isinstance(buffer, BottomType) and (counts is None or displacements is None):
        raise ValueError("message: BOTTOM requires counts and displacements")
    if counts is None and displacements is None:
        counts, displacements = [1] * num_ranks, [0] * num_ranks
    if counts is None or displacements is None:
        raise TypeError("message: expecting counts and displacements, or neither")
    counts = _per_rank(list(counts), num_ranks, operator.mul)
    displacements = _per_rank(list(displacements), num_ranks, operator.mul)
    view = memoryview(bytearray()) if isinstance(buffer, BottomType) else byte_view(buffer)[0]
    blocks = []
    for count, displacement, kind in zip(counts, displacements, types, strict=True):
        if isinstance(buffer, BottomType):
            blocks.append(Spec(*_all_memory(kind, count, displacement), count, kind))
        else:
            blocks.append(_fitted(view, count, displacement, kind))
    return Blocks(blocks)
