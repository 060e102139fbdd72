"""MPI's exceptions and error handlers."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable
from typing import Any

from remesh.mpi.calls.error_classes import CLASSES, LASTCODE, TEXTS
from remesh.mpi.upper.handles import Handle

_added: dict[int, tuple[int, str]] = {}
"""Code that the program added -> its class and text."""
_first_free = LASTCODE + 1


class Exception(RuntimeError):
    """An MPI call failed; carries the error code."""

    def __new__(cls, ierr: int = 0) -> Exception:
        self = super().__new__(cls, ierr)
        self.ob_mpi = ierr if ierr >= 0 else CLASSES["ERR_UNKNOWN"]
        self.detail = ""
        return self

    def __init__(self, ierr: int = 0) -> None:
        super().__init__(ierr)

    ob_mpi: int
    detail: str

    def __eq__(self, other: object) -> bool:
        return self.ob_mpi == (other.ob_mpi if isinstance(other, Exception) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self.ob_mpi < int(other)

    def __le__(self, other: Any) -> bool:
        return self.ob_mpi <= int(other)

    def __gt__(self, other: Any) -> bool:
        return self.ob_mpi > int(other)

    def __ge__(self, other: Any) -> bool:
        return self.ob_mpi >= int(other)

    def __hash__(self) -> int:
        return hash(self.ob_mpi)

    def __bool__(self) -> bool:
        return self.ob_mpi != 0

    def __int__(self) -> int:
        return self.ob_mpi

    def __repr__(self) -> str:
        return f"MPI.Exception({self.ob_mpi})"

    def __str__(self) -> str:
        text = Get_error_string(self.ob_mpi)
        return f"{text}: {self.detail}" if self.detail else text

    def Get_error_code(self) -> int:
        return self.ob_mpi

    def Get_error_class(self) -> int:
        return Get_error_class(self.ob_mpi)

    def Get_error_string(self) -> str:
        return Get_error_string(self.ob_mpi)

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)


Exception.__module__ = "mpi4py.MPI"


def failure(name: str, detail: str = "") -> Exception:
    """An exception of an error class, by its name, with what exactly is wrong."""
    return numbered_failure(CLASSES[name], detail)


def numbered_failure(number: int, detail: str = "") -> Exception:
    """The same by the class's number."""
    error = Exception(number)
    error.detail = detail
    return error


def Get_error_class(errorcode: int) -> int:
    """Convert an error code into its error class."""
    return _added[errorcode][0] if errorcode in _added else errorcode


def Get_error_string(errorcode: int) -> str:
    """The text of an error code."""
    if errorcode in _added:
        return _added[errorcode][1]
    if 0 <= errorcode < len(TEXTS):
        name = next(name for name, number in CLASSES.items() if number == errorcode)
        return f"MPI_{name}: {TEXTS[errorcode]}"
    return f"MPI error code {errorcode}"


def last_used_code() -> int:
    """The largest code that there is."""
    return max(LASTCODE, _first_free - 1)


def Add_error_class() -> int:
    """Add an error class of the program's own."""
    global _first_free
    code, _first_free = _first_free, _first_free + 1
    _added[code] = (code, "")
    return code


def Add_error_code(errorclass: int) -> int:
    """Add an error code to a class."""
    code = Add_error_class()
    _added[code] = (errorclass, "")
    return code


def Add_error_string(errorcode: int, string: str) -> None:
    """Give a text to a code or class of the program's own."""
    if errorcode not in _added:
        raise failure("ERR_ARG", f"error code {errorcode} is not one that the program added")
    _added[errorcode] = (_added[errorcode][0], string)


def Remove_error_string(errorcode: int) -> None:
    """Take the text away again."""
    Add_error_string(errorcode, "")


def _remove(number: int, *, is_class: bool) -> None:
    kind = "class" if is_class else "code"
    if number not in _added or (_added[number][0] == number) != is_class:
        raise failure("ERR_ARG", f"error {kind} {number} is not one that the program added")
    if _added[number][1]:
        raise failure("ERR_ARG", f"error {kind} {number} still has a text; remove that first")
    if any(of == number for code, (of, _) in _added.items() if code != number):
        raise failure("ERR_ARG", f"error class {number} still has codes; remove them first")
    del _added[number]


def Remove_error_code(errorcode: int) -> None:
    """Take away a code that has no text."""
    _remove(errorcode, is_class=False)


def Remove_error_class(errorclass: int) -> None:
    """Take away a class that has neither codes nor a text."""
    _remove(errorclass, is_class=True)


def run_callback(kind: str, callback: Callable[..., Any], *args: Any) -> Any:
    """What a program's callback returns. MPI calls it: an exception is shown, and the MPI call fails."""
    try:
        return callback(*args)
    except builtins.Exception as error:
        traceback.print_exc()
        if isinstance(error, Exception):
            raise
        raise failure("ERR_OTHER", f"a callback of {kind} raised {type(error).__name__}: {error}") from error


class Errhandler(Handle):
    """What becomes of an error: mpi4py raises in any case; the handler is kept and handed back."""

    def Free(self) -> None:
        if self._h is None:
            raise failure("ERR_ARG", "freeing a null error handler")
        self._h = None


ERRHANDLER_NULL = Errhandler()
ERRORS_RETURN = Errhandler._wrap("ERRORS_RETURN")
ERRORS_ABORT = Errhandler._wrap("ERRORS_ABORT")
ERRORS_ARE_FATAL = Errhandler._wrap("ERRORS_ARE_FATAL")
