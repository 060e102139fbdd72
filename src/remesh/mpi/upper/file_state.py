"""Content of a File: the descriptor, the view, and where its pointers are."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.datatype import PREDEFINED, Datatype
from remesh.mpi.upper.exceptions import Errhandler, failure
from remesh.mpi.upper.file_access import in_file
from remesh.mpi.upper.file_data import ViewData, make_view_data
from remesh.mpi.upper.file_views import FileView
from remesh.mpi.upper.link import link
from remesh.mpi.upper.shared_pointer import SharedPointer
from remesh.mpi.upper.together import Comm

BYTE = PREDEFINED["BYTE"]
Shortly = Callable[[int, Any], int | None] | None


@dataclass(frozen=True, slots=True)
class Split:
    """A split collective that has begun: one for each file and process. Source: MPI 4.1, section 14.4.5."""

    name: str  # of its call, without ``_begin``
    num_bytes: int | None  # None: it failed
    problem: builtins.Exception | None  # why; raised on all ranks at its end


@dataclass(eq=False)
class FileState:
    """Content of a File. After a change of its descriptor, view or atomicity it has to be settled again."""

    comm: Comm  # of its own
    path: str | bytes
    descriptor: int
    amode: int
    shared: SharedPointer
    info: dict[str, str]
    errhandler: Errhandler
    view: FileView = field(default_factory=lambda: FileView(0, 1, BYTE._layout))
    etype: Datatype = field(default_factory=lambda: BYTE)
    filetype: Datatype = field(default_factory=lambda: BYTE)
    position: int = 0  # individual file pointer, etypes of the view
    is_atomic: bool = False
    is_dirty: bool = False  # this rank has written since its last flush
    split: Split | None = None
    data: ViewData = field(init=False)
    read_shortly: Shortly = field(init=False)
    write_shortly: Shortly = field(init=False)
    """`ViewData.read` and `ViewData.write` for accesses that need nothing else; None where the file allows none."""

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Make what accesses use."""
        self.data = make_view_data(link().gate, self.descriptor, self.view)
        is_long = self.is_atomic or self.amode & k.MODE_SEQUENTIAL
        self.read_shortly = None if is_long or self.amode & k.MODE_WRONLY else self.data.read
        self.write_shortly = None if is_long or self.amode & k.MODE_RDONLY else self.data.write

    @property
    def name(self) -> str:
        return os.fsdecode(self.path)

    def size(self) -> int:
        """Length of the file, bytes."""
        with in_file(f"MPI.File: asking for the size of {self.name}"):
            return os.fstat(self.descriptor).st_size

    def sought(self, offset: int, whence: int, current: int) -> int:
        """Where a pointer goes, etypes."""
        if whence == k.SEEK_SET:
            base = 0
        elif whence == k.SEEK_CUR:
            base = current
        elif whence == k.SEEK_END:
            base = self.view.num_etypes_before(self.size())
        else:
            raise failure("ERR_ARG", f"seeking in {self.name}: whence is {whence}; give SEEK_SET, SEEK_CUR or SEEK_END")
        if base + offset < 0:
            raise failure(
                "ERR_ARG", f"seeking in {self.name}: {base} + {offset} lies before the view; expected 0 or more"
            )
        return base + offset

    def expect_random_access(self, call: str) -> None:
        """Raise unless the file may be read and written at any place."""
        if self.amode & k.MODE_SEQUENTIAL:
            raise failure(
                "ERR_UNSUPPORTED_OPERATION",
                f"MPI.File.{call}: {self.name} is open with MODE_SEQUENTIAL; use the shared pointer",
            )
