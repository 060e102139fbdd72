"""Message buffers as programs write them: ``data``, ``[data, type]``, ``[data, count, type]``, ...

A :class:`Spec` is one run of elements, a :class:`Blocks` one run for every rank. Both give the bytes to send as one
contiguous view (in place where the datatype is dense, else packed), and a landing for what is received.
"""

from __future__ import annotations

import ctypes
from typing import Any

from remesh.transparent.calls.table import PARCEL
from remesh.transparent.native import NATIVE
from remesh.transparent.upper.basic_types import name_of_code
from remesh.transparent.upper.datatype import PREDEFINED, Datatype
from remesh.transparent.upper.errors import failure
from remesh.transparent.upper.views import byte_view


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
            raise failure("ERR_COUNT", f"message: negative count {count}")

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
        if not given:
            raise failure("ERR_TYPE", "message: the datatype is null")
        return given
    if isinstance(given, str):
        return Datatype.fromcode(given)
    raise TypeError(f"message: expecting a datatype, got {type(given).__name__}")


def _is_type(given: Any) -> bool:
    return isinstance(given, (Datatype, str))


def _base(buffer: Any, datatype: Any) -> tuple[memoryview, Datatype, bool]:
    """View, datatype, and whether the view is all memory."""
    if buffer is None or isinstance(buffer, BottomType):
        if datatype is None:
            return memoryview(bytearray()), PREDEFINED["BYTE"], False
        return memoryview(bytearray()), _as_datatype(datatype), isinstance(buffer, BottomType)
    view, form = byte_view(buffer)
    if datatype is None:
        name = "BYTE" if isinstance(buffer, (bytes, bytearray)) else name_of_code(form)
        if name is None:
            raise KeyError(f"message: no MPI datatype for a buffer of format {form!r}; name one: [data, datatype]")
        return view, PREDEFINED[name], False
    return view, _as_datatype(datatype), False


def _all_memory(datatype: Datatype, count: int, address: int = 0) -> tuple[memoryview, int]:
    """The memory that elements at an address touch, and where they begin in it."""
    low, high = datatype._layout.span(count)
    if high == low:
        return memoryview(b""), 0
    return memoryview((ctypes.c_char * (high - low)).from_address(address + low)).cast("B"), -low


def is_in_place(message: Any) -> bool:
    """Whether the data stand in the other buffer."""
    return message is None or isinstance(message, InPlaceType)


def parse(message: Any, num_blocks: int = 1) -> Spec:
    """One run of elements; a count that is named is that of one of ``num_blocks``."""
    count: Any = None
    displacement = 0
    datatype: Any = None
    buffer = message
    if isinstance(message, (list, tuple)):
        parts = list(message)
        buffer = parts.pop(0) if parts else None
        if parts and (parts[-1] is None or _is_type(parts[-1])):
            datatype = parts.pop()
        if parts and isinstance(parts[0], (list, tuple)):
            count, displacement = [*parts[0], None, 0][:2] if len(parts[0]) < 2 else parts[0]
        elif parts:
            count = parts[0]
            displacement = parts[1] if len(parts) > 1 else 0
        if len(parts) > 2:
            raise ValueError("message: expecting 2 to 4 items")
    if count is not None:
        count = int(count) * num_blocks
    view, kind, everywhere = _base(buffer, datatype)
    if everywhere:
        whole, start = _all_memory(kind, int(count or 0))
        return Spec(whole, start, int(count or 0), kind)
    return _fitted(view, count, displacement or 0, kind)


def _fitted(view: memoryview, count: Any, displacement: int, datatype: Datatype) -> Spec:
    layout = datatype._layout
    start = displacement * layout.extent
    if count is None:
        room = len(view) - start
        if layout.extent <= 0 or room <= 0:
            return Spec(view, start, 0, datatype)
        if room % layout.extent:
            raise ValueError(
                f"message: buffer of {len(view)} bytes is no multiple of the datatype's extent {layout.extent}"
            )
        return Spec(view, start, room // layout.extent, datatype)
    low, high = layout.span(int(count))
    if start + low < 0 or start + high > len(view):
        raise ValueError(f"message: buffer of {len(view)} bytes is too small for {count} elements from {displacement}")
    return Spec(view, start, int(count), datatype)


def parse_blocks(message: Any, num_ranks: int) -> Blocks:
    """One run of elements for each rank."""
    counts: Any = None
    displacements: Any = None
    datatype: Any = None
    buffer = message
    if isinstance(message, (list, tuple)):
        parts = list(message)
        buffer = parts.pop(0) if parts else None
        if parts and (parts[-1] is None or _is_type(parts[-1])):
            datatype = parts.pop()
        if len(parts) == 2:
            counts, displacements = parts
        elif len(parts) == 1 and isinstance(parts[0], tuple) and len(parts[0]) == 2:
            counts, displacements = parts[0]
        elif len(parts) == 1:
            counts = parts[0]
    view, kind, everywhere = _base(buffer, datatype)
    extent = kind._layout.extent
    if counts is None:
        share = len(view) // (extent * num_ranks) if extent and num_ranks else 0
        counts = [share] * num_ranks
    elif isinstance(counts, int):
        counts = [counts] * num_ranks
    counts = [int(count) for count in counts]
    if len(counts) != num_ranks:
        raise ValueError(f"message: expecting {num_ranks} items in counts, got {len(counts)}")
    if displacements is None:
        displacements = [sum(counts[:rank]) for rank in range(num_ranks)]
    elif isinstance(displacements, int):
        displacements = [displacements * rank for rank in range(num_ranks)]
    if everywhere:
        raise failure("ERR_BUFFER", "message: BOTTOM with counts for each rank; use Alltoallw")
    return Blocks([_fitted(view, n, int(d), kind) for n, d in zip(counts, displacements, strict=True)])


def parse_typed_blocks(message: Any, num_ranks: int) -> Blocks:
    """One run of elements for each rank, each of a datatype of its own, displacements in bytes."""
    parts = list(message)
    buffer, types = parts[0], [_as_datatype(one) for one in parts[-1]]
    rest = parts[1:-1]
    if len(rest) == 1 and isinstance(rest[0], tuple):
        rest = list(rest[0])
    counts = list(rest[0]) if rest else [1] * num_ranks
    displacements = list(rest[1]) if len(rest) > 1 else [0] * num_ranks
    if isinstance(buffer, BottomType):
        blocks = []
        for count, displacement, kind in zip(counts, displacements, types, strict=True):
            view, start = _all_memory(kind, count, displacement)
            blocks.append(Spec(view, start, count, kind))
        return Blocks(blocks)
    view = byte_view(buffer)[0] if buffer is not None else memoryview(bytearray())
    return Blocks([Spec(view, int(d), int(n), kind) for n, d, kind in zip(counts, displacements, types, strict=True)])
