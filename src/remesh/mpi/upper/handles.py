"""What all MPI objects of the upper half have in common.

An MPI object is a thin Python object around shared content: ``Intracomm(comm)`` is another object for the same
communicator, both are equal, and freeing through one leaves the other with a freed communicator. ``None`` as content is
the null handle. Handles as integers exist for programs that ask for them and mean nothing outside the process.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

_by_number: dict[int, Any] = {}
"""Content of every object that was asked for its number."""
_named: dict[int, tuple[str, Handle]] = {}
"""Predefined content -> the name that the module has it under, and the object."""
_nulls: dict[type, tuple[str, Handle]] = {}
"""The same for the null objects, by their root class."""


class Handle:
    """Base of all MPI objects; ``_h`` is the content, or None for the null handle."""

    __slots__ = ("__weakref__", "_h")
    _h: Any
    _freed_by: ClassVar[str] = "Free"  # the method that frees

    def __new__(cls, other: Any = None) -> Self:
        self: Self = object.__new__(cls)
        if other is not None and not isinstance(other, _root(cls)):
            raise TypeError(
                f"Argument 'other' has incorrect type (expected {cls.__name__}, got {type(other).__name__})"
            )
        self._h = None if other is None else other._h
        if self._h is not None:
            cls._expect(self._h)
        return self

    @classmethod
    def _expect(cls, content: Any) -> None:
        """Raise TypeError if content is not what this class is for."""

    @classmethod
    def _wrap(cls, content: Any) -> Self:
        self = object.__new__(cls)
        self._h = content
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle) or _root(type(self)) is not _root(type(other)):
            return NotImplemented
        return self._h is other._h

    def __ne__(self, other: object) -> bool:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    __hash__ = None  # type: ignore[assignment]  # freeing changes what it is equal to

    def __bool__(self) -> bool:
        return self._h is not None

    def __reduce__(self) -> str | tuple[Any, ...]:
        known = _nulls.get(_root(type(self))) if self._h is None else _named.get(id(self._h))
        if known is None:
            return self._reduce()
        name, original = known
        return name if self is original else (type(self), (original,))

    def _reduce(self) -> str | tuple[Any, ...]:
        """How an object that is neither predefined nor null is pickled."""
        if self._h is None:
            return type(self), ()
        raise ValueError(f"cannot pickle a {type(self).__name__} that is not predefined")

    def toint(self) -> int:
        """A number for the object, good in this process."""
        if self._h is None:
            return 0
        _by_number[id(self._h)] = self._h
        return id(self._h)

    py2f = toint
    handle = property(toint)

    @classmethod
    def fromint(cls, arg: int) -> Self:
        """The object of a number."""
        return cls._class_for(_by_number[arg])._wrap(_by_number[arg]) if arg in _by_number else cls()

    fromhandle = f2py = fromint

    @classmethod
    def _class_for(cls, content: Any) -> type[Self]:
        """The class that shows content best."""
        return cls

    def free(self) -> None:
        """Free the object unless it is null; of what is predefined only this handle becomes null."""
        known = _named.get(id(self._h))
        if self._h is None or (known is not None and known[1] is self):
            return
        if known is None and hasattr(self, self._freed_by) and not getattr(self, "is_predefined", False):
            getattr(self, self._freed_by)()
        else:
            self._h = None


def _root(cls: type) -> type[Handle]:
    """The class directly below Handle that ``cls`` is or comes from."""
    return next(base for base in cls.__mro__ if Handle in base.__bases__)


def name_predefined(names: dict[str, Any]) -> None:
    """Remember the names of predefined objects, so that they can be pickled."""
    for name, value in names.items():
        if isinstance(value, Handle) and name.isupper():
            if value._h is None:
                _nulls[_root(type(value))] = (name, value)
            else:
                _named.setdefault(id(value._h), (name, value))
