"""What handles share that have an error handler: it is kept and handed back; mpi4py raises in any case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remesh.mpi.calls.table import BY_NAME
from remesh.mpi.upper.exceptions import ERRORS_RETURN, Errhandler, failure
from remesh.mpi.upper.link import link

_ABORT = BY_NAME["abort"]


def abort(errorcode: int) -> None:
    """End the whole job."""
    link().ask(_ABORT, (errorcode,))


class WithErrhandler:
    """Mixin for handles whose content has an ``errhandler``."""

    __slots__ = ()
    _content: Any

    def Get_errhandler(self) -> Errhandler:
        return Errhandler(self._content.errhandler or ERRORS_RETURN)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        if not errhandler:
            raise failure("ERR_ARG", "setting a null error handler")
        self._content.errhandler = Errhandler(errhandler)

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        return Errhandler._wrap(errhandler_fn)

    def Call_errhandler(self, errorcode: int) -> None:
        """Hand an error to the handler; ERRORS_RETURN does nothing with it. Source: MPI 4.1, section 9.3."""
        handler = self.Get_errhandler()
        if not errorcode or handler == ERRORS_RETURN:
            return
        if callable(handler._h):
            handler._h(self, errorcode)
        else:
            abort(errorcode)
