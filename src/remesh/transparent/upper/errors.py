"""MPI's exceptions and error handlers."""

from __future__ import annotations

from typing import Any

from remesh.transparent.calls.errors import CLASSES, LASTCODE, TEXTS
from remesh.transparent.upper.handles import Handle

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


def Remove_error_code(errorcode: int) -> None:
    """Take a code away again."""
    if errorcode not in _added:
        raise failure("ERR_ARG", f"error code {errorcode} is not one that the program added")
    del _added[errorcode]


Remove_error_class = Remove_error_code


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
