"""How do the data of a view get between memory and a file? By the C extension, or by its twin here.

An object of a descriptor and a view is made when the view is set, and used by all accesses: it finds the runs, goes
through the gate (:attr:`~remesh.mpi.upper.link.Link.gate`), and moves one run after another, each by one call
of the system. A file is a plain descriptor of the program: the image engine carries it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from remesh.mpi.native import NATIVE
from remesh.mpi.upper.file_views import FileView

Runs = Iterable[tuple[int, int]]
_PLAIN = frozenset("bBhHiIlLqQfdg?")
"""Formats of elements that are a basic datatype each."""


class ViewData(Protocol):
    """The data of a view. Buffers are *plain*: contiguous, of elements that are a basic datatype each."""

    def read(self, offset: int, buffer: Any) -> int | None:
        """Fill a buffer with the data from an etype on; how many bytes there were before the file's end.

        None if the buffer is not plain and writable or is no number of etypes, or the offset is negative: nothing has
        happened then. OSError as the system says.
        """

    def write(self, offset: int, buffer: Any) -> int | None:
        """The same for writing; all bytes, or OSError."""

    def count(self, buffer: Any) -> int | None:
        """How many etypes a plain buffer has; None if it is not one."""


class TwinViewData:
    """The twin of what the extension has."""

    def __init__(self, gate: AbstractContextManager[None], descriptor: int, view: FileView) -> None:
        self._gate, self._descriptor, self._view = gate, descriptor, view

    def _start(self, offset: int, data: memoryview) -> int | None:
        """Data byte at which an access begins; None if it is none."""
        etype_bytes = self._view.etype_bytes
        is_none = offset < 0 or len(data) % etype_bytes or (data.nbytes and not self._view.filetype.size)
        return None if is_none else offset * etype_bytes

    def read(self, offset: int, buffer: Any) -> int | None:
        data = _bytes_of(buffer)
        if data is None or data.readonly or (start := self._start(offset, data)) is None:
            return None
        with self._gate:
            return read_runs(self._descriptor, self._view.runs(start, len(data)), data)

    def write(self, offset: int, buffer: Any) -> int | None:
        data = _bytes_of(buffer)
        if data is None or (start := self._start(offset, data)) is None:
            return None
        with self._gate:
            return write_runs(self._descriptor, self._view.runs(start, len(data)), data)

    def count(self, buffer: Any) -> int | None:
        data = _bytes_of(buffer)
        return None if data is None else len(data) // self._view.etype_bytes


def _bytes_of(buffer: Any) -> memoryview | None:
    """The bytes of a plain buffer; None if it is not one."""
    try:
        view = memoryview(buffer)
    except TypeError:
        return None
    if not view.c_contiguous or view.format.lstrip("@=<") not in _PLAIN:
        return None
    return view.cast("B") if view.nbytes else memoryview(b"" if view.readonly else bytearray())


def read_runs(descriptor: int, runs: Runs, into: memoryview) -> int:
    """Fill a view from the runs of a file, in order; how many bytes there were before the file's end."""
    done = 0
    for position, length in runs:
        end = done + length
        while done < end:
            count = os.preadv(descriptor, [into[done:end]], position)
            if not count:
                return done
            done += count
            position += count
    return done


def write_runs(descriptor: int, runs: Runs, data: memoryview) -> int:
    """Put the bytes of a view into the runs of a file, in order; how many."""
    done = 0
    for position, length in runs:
        end = done + length
        while done < end:
            count = os.pwrite(descriptor, data[done:end], position)
            done += count
            position += count
    return done


def make_view_data(
    gate: AbstractContextManager[None], descriptor: int, view: FileView, native: Any = NATIVE
) -> ViewData:
    """What moves the data of a view of an open file, by the extension or by a twin of it."""
    if native.ViewData is None:
        return TwinViewData(gate, descriptor, view)
    tile = view.filetype
    made: ViewData = native.ViewData(gate, descriptor, view.displacement, view.etype_bytes, tile.segments, tile.extent)
    return made
