"""MPI.File: parallel files, on plain descriptors of the program and collectives of a communicator of their own.

No MPI library's files are used: each rank reads and writes its own runs of bytes, and what is collective ends when all
ranks have done their part, with one outcome for all. Source: MPI 4.1, chapter 14.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.comm import Intracomm
from remesh.mpi.upper.datatype import Datatype
from remesh.mpi.upper.errhandling import WithErrhandler
from remesh.mpi.upper.exceptions import ERRORS_RETURN, failure
from remesh.mpi.upper.file_access import check_amode, delete, flush, in_file, open_file
from remesh.mpi.upper.file_forms import add_data_access
from remesh.mpi.upper.file_state import BYTE, FileState
from remesh.mpi.upper.file_views import FileView
from remesh.mpi.upper.group import Group
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.info import INFO_NULL, Info
from remesh.mpi.upper.membership import make
from remesh.mpi.upper.shared_pointer import SharedPointer
from remesh.mpi.upper.together import agree, at_first_rank, attempt, expect_same, together

_defaults = SimpleNamespace(errhandler=ERRORS_RETURN)
"""What FILE_NULL has: the error handler of new files. Source: MPI 4.1, section 14.7."""


def _open_everywhere(comm: Intracomm, path: str | bytes, amode: int) -> int:
    """This rank's descriptor; the first rank makes the file, if the mode says so, before the others open it."""
    is_first = comm.Get_rank() == 0
    descriptor = together(comm, lambda: open_file(path, amode) if is_first else -1)
    if comm.Get_size() == 1:
        return descriptor
    others_amode = amode & ~(k.MODE_CREATE | k.MODE_EXCL)
    found, problem = attempt(lambda: descriptor if is_first else open_file(path, others_amode))
    try:
        agree(comm, problem)
    except BaseException:
        if found is not None:
            os.close(found)
        raise
    assert found is not None
    return found


def _view_of(file: FileState, disp: int, etype: Datatype, tile: Datatype) -> FileView:
    if disp == k.DISPLACEMENT_CURRENT and file.amode & k.MODE_SEQUENTIAL:
        disp = file.view.byte_offset(file.shared.get())
    try:
        return FileView(disp, etype._layout.size, tile._layout)
    except ValueError as error:
        raise failure("ERR_ARG", f"MPI.File.Set_view on {file.name}: {error}") from error


class File(WithErrhandler, Handle):
    """A file that the ranks of a communicator have open together."""

    __slots__ = ()

    @property
    def _file(self) -> FileState:
        if self._h is None:
            raise failure("ERR_FILE", "the file is null or has been closed")
        content: FileState = self._h
        return content

    @property
    def _content(self) -> Any:
        return _defaults if self._h is None else self._h

    # Opening and closing.

    @classmethod
    def Open(cls, comm: Intracomm, filename: Any, amode: int = k.MODE_RDONLY, info: Info = INFO_NULL) -> Self:
        members = comm._members
        if members.remote is not None:
            raise failure("ERR_COMM", "MPI.File.Open on an intercommunicator; give one of a single group")
        path = os.fspath(filename)
        own = Intracomm._wrap(make(members, members.next_number("file"), members.ranks))
        try:
            expect_same(own, int(amode), "MPI.File.Open: the access mode")
            check_amode(amode)
            descriptor = _open_everywhere(own, path, amode)
        except BaseException:
            own.Free()
            raise
        end = os.fstat(descriptor).st_size if amode & k.MODE_APPEND else 0
        file = FileState(
            own,
            path,
            descriptor,
            amode,
            SharedPointer(own, end),
            dict(info.items()),
            _defaults.errhandler,
            position=end,
        )
        # The shared pointer is there, and nobody writes before all have seen where the end is.
        agree(own, None)
        return cls._wrap(file)

    def Close(self) -> None:
        file = self._file
        if file.split is not None:
            raise failure("ERR_IO", f"MPI.File.Close: {file.split.name}_begin on {file.name} has had no end; end it")
        deletes = bool(file.amode & k.MODE_DELETE_ON_CLOSE)

        def close() -> None:
            descriptor, file.descriptor = file.descriptor, -1
            file.settle()
            with in_file(f"MPI.File.Close: closing {file.name}"):
                try:
                    if file.is_dirty and not deletes:
                        flush(descriptor)
                finally:
                    os.close(descriptor)

        self._h = None
        try:
            together(file.comm, close)
            if deletes:
                at_first_rank(file.comm, lambda: delete(file.path, "MPI.File.Close: deleting"))
        finally:
            file.shared.free()
            file.comm.Free()

    @classmethod
    def Delete(cls, filename: Any, info: Info = INFO_NULL) -> None:
        delete(os.fspath(filename), "MPI.File.Delete: deleting")

    # Size.

    def _resize(self, call: str, size: int, change: Callable[[int], None]) -> None:
        """The first rank changes the length, when all have come."""
        file = self._file
        expect_same(file.comm, int(size), f"MPI.File.{call}: the size")
        if size < 0:
            raise failure("ERR_ARG", f"MPI.File.{call}: {size} bytes, expected none or more")
        if file.amode & k.MODE_RDONLY:
            raise failure("ERR_READ_ONLY", f"MPI.File.{call}: {file.name} is open for reading; open it for writing")

        def resize() -> None:
            with in_file(f"MPI.File.{call}: making {file.name} {size} bytes long"):
                change(file.descriptor)

        file.is_dirty = True
        at_first_rank(file.comm, resize)

    def Set_size(self, size: int) -> None:
        self._resize("Set_size", size, lambda descriptor: os.ftruncate(descriptor, size))

    def Preallocate(self, size: int) -> None:
        def allocate(descriptor: int) -> None:
            if size:
                os.posix_fallocate(descriptor, 0, size)

        self._resize("Preallocate", size, allocate)

    def Get_size(self) -> int:
        return self._file.size()

    size = property(Get_size)

    # What it was opened with.

    def Get_amode(self) -> int:
        return self._file.amode

    def Get_group(self) -> Group:
        group: Group = self._file.comm.Get_group()
        return group

    def Get_info(self) -> Info:
        return Info.Create(self._file.info)

    def Set_info(self, info: Info) -> None:
        self._file.info = dict(info.items())

    amode = property(Get_amode)
    group = property(Get_group)
    group_size = property(lambda self: self._file.comm.Get_size())
    group_rank = property(lambda self: self._file.comm.Get_rank())
    info = property(Get_info, Set_info)

    # Views and positions; offsets are etypes of the view.

    def Set_view(
        self,
        disp: int = 0,
        etype: Datatype = BYTE,
        filetype: Datatype | None = None,
        datarep: str = "native",
        info: Info = INFO_NULL,
    ) -> None:
        file = self._file
        tile = etype if filetype is None else filetype
        expect_same(file.comm, datarep, "MPI.File.Set_view: the data representation")
        if datarep != "native":
            raise failure("ERR_UNSUPPORTED_DATAREP", f"MPI.File.Set_view: {datarep!r} on {file.name}; give 'native'")
        view = together(file.comm, lambda: _view_of(file, disp, etype, tile))
        file.view = view
        file.settle()
        # The types live on here when the program frees its handles.
        file.etype, file.filetype = Datatype._wrap(etype._type), Datatype._wrap(tile._type)
        file.info |= dict(info.items())
        file.position = 0
        file.shared.set(0)

    def Get_view(self) -> tuple[int, Datatype, Datatype, str]:
        file = self._file
        types = Datatype._wrap(file.etype._type), Datatype._wrap(file.filetype._type)
        return (file.view.displacement, *types, "native")

    def Seek(self, offset: int, whence: int = k.SEEK_SET) -> None:
        file = self._file
        file.expect_random_access("Seek")
        file.position = file.sought(offset, whence, file.position)

    def Get_position(self) -> int:
        self._file.expect_random_access("Get_position")
        return self._file.position

    def Get_byte_offset(self, offset: int) -> int:
        if offset < 0:
            raise failure("ERR_ARG", f"MPI.File.Get_byte_offset of {offset}, expected 0 or more")
        return self._file.view.byte_offset(offset)

    def Seek_shared(self, offset: int, whence: int = k.SEEK_SET) -> None:
        file = self._file
        expect_same(file.comm, (int(offset), int(whence)), "MPI.File.Seek_shared: offset and whence")
        file.shared.set(together(file.comm, lambda: file.sought(offset, whence, file.shared.get())))

    def Get_position_shared(self) -> int:
        return self._file.shared.get()

    def Get_type_extent(self, datatype: Datatype) -> int:
        _ = self._file
        return datatype._layout.extent

    # Consistency.

    def Set_atomicity(self, flag: bool) -> None:
        file = self._file
        expect_same(file.comm, bool(flag), "MPI.File.Set_atomicity: the flag")
        file.is_atomic = bool(flag)
        file.settle()

    def Get_atomicity(self) -> bool:
        return self._file.is_atomic

    atomicity = property(Get_atomicity, Set_atomicity)

    def Sync(self) -> None:
        file = self._file

        def sync() -> None:
            with in_file(f"MPI.File.Sync: flushing {file.name}"):
                flush(file.descriptor)

        together(file.comm, sync)
        file.is_dirty = False


add_data_access(File)
FILE_NULL = File()
