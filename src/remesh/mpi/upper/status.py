"""What became of a receive."""

from __future__ import annotations

from array import array
from typing import Any, Self

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.datatype import PREDEFINED, Datatype
from remesh.mpi.upper.link import Completion


class Status:
    """Source, tag, error and size of a message."""

    __slots__ = ("__weakref__", "_cancelled", "_error", "_num_bytes", "_source", "_tag")

    def __new__(cls, status: Status | None = None) -> Self:
        self = object.__new__(cls)
        self._source, self._tag, self._error = k.ANY_SOURCE, k.ANY_TAG, CLASSES["SUCCESS"]
        self._num_bytes, self._cancelled = 0, False
        if status is not None:
            if not isinstance(status, Status):
                raise TypeError(f"Argument 'status' has incorrect type (expected Status, got {type(status).__name__})")
            self._take(status)
        return self

    _source: int
    _tag: int
    _error: int
    _num_bytes: int
    _cancelled: bool

    def _take(self, other: Status) -> None:
        self._source, self._tag, self._error = other._source, other._tag, other._error
        self._num_bytes, self._cancelled = other._num_bytes, other._cancelled

    def _fill(self, completion: Completion, source: int) -> None:
        """From a completion whose source is ``source`` in the communicator's ranks."""
        self._source, self._tag, self._error = source, completion.tag, completion.error
        self._num_bytes, self._cancelled = completion.num_bytes, completion.cancelled

    def _key(self) -> tuple[Any, ...]:
        return self._source, self._tag, self._error, self._num_bytes, self._cancelled

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Status) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return self._key() != other._key() if isinstance(other, Status) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._restored, self._key()

    @classmethod
    def _restored(cls, *key: Any) -> Self:
        status = cls()
        status._source, status._tag, status._error, status._num_bytes, status._cancelled = key
        return status

    def Get_source(self) -> int:
        return self._source

    def Set_source(self, source: int) -> None:
        self._source = source

    def Get_tag(self) -> int:
        return self._tag

    def Set_tag(self, tag: int) -> None:
        self._tag = tag

    def Get_error(self) -> int:
        return self._error

    def Set_error(self, error: int) -> None:
        self._error = error

    def Get_count(self, datatype: Datatype = PREDEFINED["BYTE"]) -> int:
        size = datatype.Get_size()
        if size == 0:
            return 0 if self._num_bytes == 0 else k.UNDEFINED
        return self._num_bytes // size if self._num_bytes % size == 0 else k.UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        leaf = datatype._type.leaf
        if leaf is None or leaf.size == 0:
            return self.Get_count(datatype)
        return self._num_bytes // leaf.size if self._num_bytes % leaf.size == 0 else k.UNDEFINED

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        leaf = datatype._type.leaf
        self._num_bytes = count * (leaf.size if leaf is not None else datatype.Get_size())

    def Is_cancelled(self) -> bool:
        return self._cancelled

    def Set_cancelled(self, flag: bool) -> None:
        self._cancelled = bool(flag)

    source = property(Get_source, Set_source)
    tag = property(Get_tag, Set_tag)
    error = property(Get_error, Set_error)
    cancelled = property(Is_cancelled, Set_cancelled)

    def _set_count(self, count: int) -> None:
        self._num_bytes = count

    count = property(lambda self: self.Get_count(), _set_count)

    def tomemory(self) -> memoryview:
        """As integers of ours."""
        return memoryview(array("i", self.py2f()))

    def py2f(self) -> list[int]:
        """As integers of ours."""
        return [self._source, self._tag, self._error, int(self._cancelled), self._num_bytes, 0]

    @classmethod
    def f2py(cls, arg: list[int]) -> Status:
        """From what :meth:`py2f` gave."""
        source, tag, error, cancelled, num_bytes, _ = arg
        return cls._restored(source, tag, error, num_bytes, bool(cancelled))
