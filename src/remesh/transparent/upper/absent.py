"""What is not carried over checkpoints: sessions and ports. Each says so by the call's name."""

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


_CONSTRUCTORS = frozenset(("Init",))


class Session(Handle):
    """Sessions of the MPI library."""

    __slots__ = ()


_refusing(
    Session,
    """Init Finalize Get_num_psets Get_nth_pset Get_info Get_pset_info Create_group Get_errhandler Set_errhandler
    Create_errhandler Call_errhandler Attach_buffer Detach_buffer Flush_buffer Iflush_buffer""",
    "sessions are not carried over checkpoints; use COMM_WORLD",
)
SESSION_NULL = Session()


def _absent_function(name: str, why: str) -> Any:
    def function(*args: Any, **named: Any) -> NoReturn:
        _refuse(name, why)

    function.__name__ = name
    return function


FUNCTIONS = {
    name: _absent_function(name, "ports between jobs are not carried over checkpoints")
    for name in ("Open_port", "Close_port", "Publish_name", "Unpublish_name", "Lookup_name")
} | {"Register_datarep": _absent_function("Register_datarep", "files are of the representation 'native'")}
