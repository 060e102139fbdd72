"""What is not carried over checkpoints: parallel files. Each says so by the call's name."""

from __future__ import annotations

from typing import Any, NoReturn

from remesh.transparent.upper.handles import Handle


def _refuse(call: str, why: str) -> NoReturn:
    raise NotImplementedError(f"MPI.{call}: {why}")


def _refusing(cls: type, names: str, why: str) -> None:
    """Give a class methods that say what they are not."""
    for name in names.split():
        call = f"{cls.__name__}.{name}"

        def method(*args: Any, _call: str = call, **named: Any) -> NoReturn:
            _refuse(_call, why)

        method.__name__ = name
        setattr(cls, name, classmethod(method) if name in _CONSTRUCTORS else method)


_CONSTRUCTORS = frozenset(("Open", "Delete"))


class File(Handle):
    """Parallel files of the MPI library."""

    __slots__ = ()


def _refusing_properties(cls: type, names: str, why: str) -> None:
    for name in names.split():
        call = f"{cls.__name__}.{name}"

        def read(self: Any, _call: str = call) -> NoReturn:
            _refuse(_call, why)

        setattr(cls, name, property(read))


_FILES = "parallel files are not carried over checkpoints; each rank may use Python's own files"
_refusing_properties(File, "amode atomicity group group_rank group_size info size", _FILES)
_refusing(
    File,
    """Open Close Delete Set_size Preallocate Get_size Get_amode Get_group Get_info Set_info Set_view Get_view Read_at
    Read_at_all Write_at Write_at_all Iread_at Iread_at_all Iwrite_at Iwrite_at_all Read Read_all Write Write_all Iread
    Iread_all Iwrite Iwrite_all Seek Get_position Get_byte_offset Read_shared Write_shared Iread_shared Iwrite_shared
    Read_ordered Write_ordered Seek_shared Get_position_shared Read_at_all_begin Read_at_all_end Write_at_all_begin
    Write_at_all_end Read_all_begin Read_all_end Write_all_begin Write_all_end Read_ordered_begin Read_ordered_end
    Write_ordered_begin Write_ordered_end Get_type_extent Set_atomicity Get_atomicity Sync Get_errhandler
    Set_errhandler Create_errhandler Call_errhandler""",
    _FILES,
)
FILE_NULL = File()


def _absent_function(name: str, why: str) -> Any:
    def function(*args: Any, **named: Any) -> NoReturn:
        _refuse(name, why)

    function.__name__ = name
    return function


FUNCTIONS = {
    name: _absent_function(name, "ports between jobs are not carried over checkpoints")
    for name in ("Open_port", "Close_port", "Publish_name", "Unpublish_name", "Lookup_name")
} | {"Register_datarep": _absent_function("Register_datarep", "parallel files are not carried over checkpoints")}
