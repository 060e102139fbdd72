"""Sessions: groups of the processes by the names of their sets. Source: MPI 4.1, section 11.3.

Two sets are there, which every MPI has. No MPI library is asked: the ranks of a job stay the same over checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from remesh.mpi.upper.comm import predefined
from remesh.mpi.upper.errhandling import WithErrhandler
from remesh.mpi.upper.exceptions import Errhandler, failure
from remesh.mpi.upper.group import Group
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.info import Info
from remesh.mpi.upper.point_to_point import WithBuffer

_SETS: dict[str, Callable[[], Group]] = {
    "mpi://WORLD": lambda: predefined()[0].Get_group(),
    "mpi://SELF": lambda: predefined()[1].Get_group(),
}


@dataclass(eq=False)
class _Session:
    """Content of a Session."""

    info: dict[str, str] = field(default_factory=dict)
    errhandler: Errhandler | None = None
    buffer: Any = None


class Session(WithErrhandler, WithBuffer, Handle):
    """A session."""

    __slots__ = ()
    _freed_by = "Finalize"

    @property
    def _content(self) -> _Session:
        if self._h is None:
            raise failure("ERR_SESSION", "the session is null or has been finalized")
        content: _Session = self._h
        return content

    @classmethod
    def Init(cls, info: Info | None = None, errhandler: Errhandler | None = None) -> Self:
        return cls._wrap(_Session(dict(info.items()) if info else {}, Errhandler(errhandler) if errhandler else None))

    def Finalize(self) -> None:
        _ = self._content
        self._h = None

    def Get_num_psets(self, info: Info | None = None) -> int:
        _ = self._content
        return len(_SETS)

    def Get_nth_pset(self, n: int, info: Info | None = None) -> str:
        if not 0 <= n < self.Get_num_psets():
            raise failure("ERR_ARG", f"process set {n} of {len(_SETS)}")
        return list(_SETS)[n]

    def Get_info(self) -> Info:
        return Info.Create(self._content.info)

    def Get_pset_info(self, pset_name: str) -> Info:
        return Info.Create({"mpi_size": str(self.Create_group(pset_name).Get_size())})

    def Create_group(self, pset_name: str) -> Group:
        _ = self._content
        if pset_name not in _SETS:
            raise failure("ERR_ARG", f"there is no process set {pset_name!r}, expected one of {list(_SETS)}")
        return _SETS[pset_name]()


SESSION_NULL = Session()
