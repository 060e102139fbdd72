"""What is not carried over checkpoints: windows, sessions. Each says so by the call's name."""

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


_CONSTRUCTORS = frozenset(("Create", "Allocate", "Allocate_shared", "Create_dynamic", "Init", "Create_keyval"))


class Win(Handle):
    """Windows: memory that other ranks write to, without this one knowing when."""

    __slots__ = ()


class Session(Handle):
    """Sessions of the MPI library."""

    __slots__ = ()


def _refusing_properties(cls: type, names: str, why: str) -> None:
    for name in names.split():
        call = f"{cls.__name__}.{name}"

        def read(self: Any, _call: str = call) -> NoReturn:
            _refuse(_call, why)

        setattr(cls, name, property(read))


_WINDOWS = "one-sided communication is not carried over checkpoints; use messages"
_refusing_properties(Win, "attrs flavor group group_rank group_size info model name", _WINDOWS)
_refusing(
    Win,
    """Create Allocate Allocate_shared Create_dynamic Attach Detach Shared_query Free Get_group Get_info Set_info
    Get_attr Set_attr Delete_attr Create_keyval Free_keyval Put Get Accumulate Get_accumulate Fetch_and_op
    Compare_and_swap Rput Rget Raccumulate Rget_accumulate Fence Start Complete Post Wait Test Lock Unlock Lock_all
    Unlock_all Flush Flush_all Flush_local Flush_local_all Sync Get_name Set_name Get_errhandler Set_errhandler
    Create_errhandler Call_errhandler tomemory""",
    _WINDOWS,
)
_refusing(
    Session,
    """Init Finalize Get_num_psets Get_nth_pset Get_info Get_pset_info Create_group Get_errhandler Set_errhandler
    Create_errhandler Call_errhandler Attach_buffer Detach_buffer Flush_buffer Iflush_buffer""",
    "sessions are not carried over checkpoints; use COMM_WORLD",
)
WIN_NULL, SESSION_NULL = Win(), Session()


def _absent_function(name: str, why: str) -> Any:
    def function(*args: Any, **named: Any) -> NoReturn:
        _refuse(name, why)

    function.__name__ = name
    return function


FUNCTIONS = {
    name: _absent_function(name, "ports between jobs are not carried over checkpoints")
    for name in ("Open_port", "Close_port", "Publish_name", "Unpublish_name", "Lookup_name")
} | {"Register_datarep": _absent_function("Register_datarep", "files are of the representation 'native'")}
