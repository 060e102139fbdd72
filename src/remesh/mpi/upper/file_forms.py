"""The many names by which data get into files and out of them: one table, one way.

A name is made of what is done (Read, Write), where (at an offset, at this rank's pointer, at the shared one, there in
order of ranks), whether all ranks do it together, and its form: blocking, started (``I...``), or split into a begin and
an end. Every access is carried out when it is asked for; requests are born complete. Collective ones end when all ranks
have done their part, and fail on all ranks or on none; each rank reads and writes its own runs. Source: MPI 4.1,
section 14.4.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import Spec, parse
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.file_access import failure_of, locked
from remesh.mpi.upper.file_state import FileState, Split
from remesh.mpi.upper.link import Completion, link
from remesh.mpi.upper.request import Operation, Request, Work
from remesh.mpi.upper.status import Status
from remesh.mpi.upper.together import agree, attempt, together


class Place(enum.Enum):
    """Where an access begins."""

    OFFSET = "at an offset that is given"
    OWN = "at the rank's own pointer, which moves on"
    SHARED = "at the shared pointer, which moves on"
    ORDERED = "at the shared pointer, in order of ranks"


@dataclass(frozen=True, slots=True)
class Access:
    """One row: a kind of access, whatever its form."""

    name: str  # of the blocking form
    writes: bool
    place: Place
    is_collective: bool


def _rows() -> list[Access]:
    kinds = (
        *(("_at", Place.OFFSET, False), ("_at_all", Place.OFFSET, True), ("", Place.OWN, False)),
        *(("_all", Place.OWN, True), ("_shared", Place.SHARED, False), ("_ordered", Place.ORDERED, True)),
    )
    return [
        Access(f"{verb}{suffix}", verb == "Write", place, is_collective)
        for verb in ("Read", "Write")
        for suffix, place, is_collective in kinds
    ]


ACCESSES = _rows()


def _prepare(file: FileState, access: Access, buf: Any) -> tuple[Spec, int]:
    """The elements of a buffer and how many etypes they are, once the access is known to be allowed."""
    call = f"MPI.File.{access.name}"
    if access.writes and file.amode & k.MODE_RDONLY:
        raise failure(
            "ERR_READ_ONLY", f"{call}: {file.name} is open for reading; open it with MODE_RDWR or MODE_WRONLY"
        )
    if not access.writes and file.amode & k.MODE_WRONLY:
        raise failure("ERR_ACCESS", f"{call}: {file.name} is open for writing; open it with MODE_RDWR or MODE_RDONLY")
    if access.place in (Place.OFFSET, Place.OWN):
        file.expect_random_access(access.name)
    spec = parse(buf)
    num_etypes, rest = divmod(spec.num_bytes, file.view.etype_bytes)
    if rest:
        raise failure("ERR_ARG", f"{call}: {spec.num_bytes} bytes, no multiple of the etype's {file.view.etype_bytes}")
    if spec.num_bytes and not file.view.filetype.size:
        raise failure("ERR_ARG", f"{call}: {spec.num_bytes} bytes in a view whose filetype has none; set another view")
    if not access.writes and spec.view.readonly:
        raise BufferError("message: the receive buffer is read-only")
    return spec, num_etypes


def _start(file: FileState, access: Access, num_etypes: int, offset: int) -> int:
    """Where the access begins, etypes of the view; a pointer moves behind it, however much there is to read."""
    if access.place is Place.OFFSET:
        if offset < 0:
            raise failure("ERR_ARG", f"MPI.File.{access.name}: the offset is {offset}, expected 0 or more")
        return offset
    if access.place is Place.OWN:
        start, file.position = file.position, file.position + num_etypes
        return start
    return file.shared.take(num_etypes)


def _transfer(file: FileState, access: Access, spec: Spec, start: int) -> int:
    """Read or write; how many bytes: fewer than asked for only at the end of the file."""
    num_bytes, etype_bytes = spec.num_bytes, file.view.etype_bytes
    is_dense = spec.datatype._layout.is_dense
    data = spec.payload() if access.writes or is_dense else memoryview(bytearray(num_bytes))
    move = file.data.write if access.writes else file.data.read
    file.is_dirty |= access.writes
    try:
        if file.is_atomic and num_bytes:
            span = file.view.span(start * etype_bytes, num_bytes)
            # The lock, too, is inside the gate: an image does not hold it.
            with link().gate, locked(file.descriptor, span, for_writing=access.writes):
                moved = move(start, data)
        else:
            moved = move(start, data)
    except OSError as error:
        raise failure_of(error, f"MPI.File.{access.name}: on {file.name}") from error
    assert moved is not None  # the access has been prepared
    if not access.writes and not is_dense:
        spec.unpack(data[:moved])
    return moved


def _carry_out_shortly(file: FileState, access: Access, offset: int, buf: Any) -> int | None:
    """Read or write what needs neither a datatype nor another rank; None if it does: then nothing has happened."""
    move = file.write_shortly if access.writes else file.read_shortly
    if move is None:
        return None
    file.is_dirty |= access.writes
    try:
        if access.place is Place.OFFSET:
            return move(offset, buf)
        if access.place is not Place.OWN or (num_etypes := file.data.count(buf)) is None:
            return None
        start, file.position = file.position, file.position + num_etypes
        moved = move(start, buf)
    except OSError as error:
        raise failure_of(error, f"MPI.File.{access.name}: on {file.name}") from error
    if moved is None:
        file.position = start
    return moved


def _carry_out(file: FileState, access: Access, offset: int, buf: Any) -> int:
    """All of an access, without a word to other ranks: how many bytes; ranks that take turns agree beforehand."""
    moved = _carry_out_shortly(file, access, offset, buf)
    if moved is not None:
        return moved
    if access.place is Place.ORDERED:
        spec, num_etypes = together(file.comm, lambda: _prepare(file, access, buf))
        start = file.shared.take_in_turn(num_etypes)
    else:
        spec, num_etypes = _prepare(file, access, buf)
        start = _start(file, access, num_etypes, offset)
    return _transfer(file, access, spec, start)


# Forms.

Method = Callable[..., Any]


def _arguments(access: Access, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, Any]:
    """Offset and buffer; the offset is 0 where none is given."""
    names = ("offset", "buf") if access.place is Place.OFFSET else ("buf",)
    given = dict(zip(names, args, strict=False)) | named
    if len(args) > len(names) or set(given) - set(names):
        raise TypeError(f"MPI.File.{access.name} takes {', '.join(names)}")
    missing = [name for name in names if name not in given]
    if missing:
        raise TypeError(f"MPI.File.{access.name} lacks {', '.join(missing)}")
    return given.get("offset", 0), given["buf"]


def _ended(num_bytes: int) -> Completion:
    return Completion(k.ANY_SOURCE, k.ANY_TAG, num_bytes, 0)


def _tell(status: Status | None, num_bytes: int) -> None:
    if status is not None:
        status._fill(_ended(num_bytes), k.ANY_SOURCE)


def _blocking(access: Access) -> Method:
    if access.is_collective:

        def carry_out(self: Any, offset: int, buf: Any, status: Status | None) -> None:
            file = self._file
            _tell(status, together(file.comm, lambda: _carry_out(file, access, offset, buf)))
    else:

        def carry_out(self: Any, offset: int, buf: Any, status: Status | None) -> None:
            num_bytes = _carry_out(self._file, access, offset, buf)
            if status is not None:
                _tell(status, num_bytes)

    def at_offset(self: Any, offset: int, buf: Any, status: Status | None = None) -> None:
        carry_out(self, offset, buf, status)

    def at_pointer(self: Any, buf: Any, status: Status | None = None) -> None:
        carry_out(self, 0, buf, status)

    return at_offset if access.place is Place.OFFSET else at_pointer


def _started(access: Access) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> Request:
        num_bytes = _carry_out(self._file, access, *_arguments(access, args, named))
        return Request._wrap(Work([Operation(_ended(num_bytes))], ranks={}))

    return method


def _begin(access: Access) -> Method:
    def method(self: Any, *args: Any, **named: Any) -> None:
        given = _arguments(access, args, named)
        file = self._file
        if file.split is not None:
            raise failure(
                "ERR_IO", f"MPI.File.{access.name}_begin: {file.split.name}_begin has had no end; end it first"
            )
        file.split = Split(access.name, *attempt(lambda: _carry_out(file, access, *given)))

    return method


def _end(access: Access) -> Method:
    def method(self: Any, buf: Any, status: Status | None = None) -> None:
        file = self._file
        split, name = file.split, access.name
        if split is None or split.name != name:
            raise failure(
                "ERR_IO", f"MPI.File.{name}_end: {split and split.name}_begin is under way, expected {name}_begin"
            )
        file.split = None
        agree(file.comm, split.problem)
        assert split.num_bytes is not None
        _tell(status, split.num_bytes)

    return method


def forms(access: Access) -> dict[str, Method]:
    """The methods of one row, by name."""
    name = access.name
    methods = {name: _blocking(access)}
    if access.place is not Place.ORDERED:
        methods[f"I{name[0].lower()}{name[1:]}"] = _started(access)
    if access.is_collective:
        methods |= {f"{name}_begin": _begin(access), f"{name}_end": _end(access)}
    return methods


def add_data_access(cls: type) -> None:
    """Give a class all forms of all rows."""
    for access in ACCESSES:
        for name, method in forms(access).items():
            method.__name__, method.__qualname__ = name, f"{cls.__name__}.{name}"
            method.__doc__ = f"{'Write' if access.writes else 'Read'} {access.place.value}."
            setattr(cls, name, method)
