"""Attributes that a program hangs on communicators and datatypes, under keys of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from remesh.mpi.upper.exceptions import failure, run_callback

Copy = Callable[[Any, int, Any], Any]
Delete = Callable[[Any, int, Any], None]
_numbers = count(1000)


@dataclass(frozen=True, slots=True)
class _Key:
    """A keyval; it stays usable where it is set until all is deleted, even when freed."""

    copy: Copy | None
    delete: Delete | None


_keys: dict[int, _Key] = {}
_freed: set[int] = set()


class Attributes(dict[int, Any]):
    """Keyval -> value."""


class WithAttributes:
    """Mixin for handles whose content has ``attributes``."""

    __slots__ = ()
    _h: Any

    def _attributes(self) -> Attributes:
        if self._h is None:
            raise failure("ERR_ARG", "the object is null or has been freed")
        attributes: Attributes = self._h.attributes
        return attributes

    def _predefined_attribute(self, keyval: int) -> Any:
        raise failure("ERR_KEYVAL", f"there is no keyval {keyval}")

    def Get_attr(self, keyval: int) -> Any:
        if keyval not in _keys:
            return self._predefined_attribute(keyval)
        return self._attributes().get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        if keyval not in _keys or keyval in _freed:
            raise failure("ERR_KEYVAL", f"there is no keyval {keyval}")
        attributes = self._attributes()
        if keyval in attributes:
            self.Delete_attr(keyval)
        attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        attributes = self._attributes()
        if keyval not in _keys or keyval not in attributes:
            raise failure("ERR_KEYVAL", f"there is no attribute under keyval {keyval}")
        delete = _keys[keyval].delete
        try:
            if delete is not None:
                run_callback("a keyval", delete, self, keyval, attributes[keyval])
        finally:
            # What could not be deleted is gone all the same, or the object could never be freed.
            del attributes[keyval]

    def _delete_attributes(self) -> None:
        for keyval in list(self._attributes())[::-1]:
            self.Delete_attr(keyval)

    def _copy_attributes(self, other: Any) -> None:
        for keyval, value in self._attributes().items():
            copy = _keys[keyval].copy
            if copy is None or copy is False:  # type: ignore[comparison-overlap]
                continue
            copied = value if copy is True else run_callback("a keyval", copy, self, keyval, value)  # type: ignore[comparison-overlap]
            if copied is not NotImplemented:
                other._attributes()[keyval] = copied

    @classmethod
    def Create_keyval(cls, copy_fn: Copy | None = None, delete_fn: Delete | None = None, nopython: bool = False) -> int:
        """A new key; ``copy_fn`` decides what a duplicate gets, ``NotImplemented`` being nothing."""
        keyval = next(_numbers)
        _keys[keyval] = _Key(copy_fn, delete_fn)
        return keyval

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Take a key back; always KEYVAL_INVALID."""
        if keyval not in _keys or keyval in _freed:
            raise failure("ERR_KEYVAL", f"there is no keyval {keyval}")
        _freed.add(keyval)
        return -1
