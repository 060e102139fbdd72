"""How do the data of a view get between memory and a file? By the C extension.

An object of a descriptor and a view is made when the view is set, and used by all accesses: it finds the runs, goes
through the gate (:attr:`~remesh.mpi.upper.link.Link.gate`), and moves one run after another, each by one call
of the system. A file is a plain descriptor of the program: the image engine carries it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from remesh.mpi.native import NATIVE
from remesh.mpi.upper.file_views import FileView


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


def make_view_data(gate: AbstractContextManager[None], descriptor: int, view: FileView) -> ViewData:
    """What moves the data of a view of an open file."""
    tile = view.filetype
    made: ViewData = NATIVE.ViewData(gate, descriptor, view.displacement, view.etype_bytes, tile.segments, tile.extent)
    return made
