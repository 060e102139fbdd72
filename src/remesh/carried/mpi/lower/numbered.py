"""Objects by number, as a mapping that the engine looks into without Python (``_table.c``)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Generic, TypeVar

from remesh.carried.mpi.native import NATIVE

Value = TypeVar("Value")


class Numbered(NATIVE.Table, MutableMapping[int, Value], Generic[Value]):  # type: ignore[misc]
    """A dict whose keys are numbers from 0 to 2 ** 64 - 1; they come in order.

    >>> table = Numbered({7: "seven", 1 << 62: "large"})
    >>> table[3] = "three"
    >>> list(table.items())
    [(3, 'three'), (7, 'seven'), (4611686018427387904, 'large')]
    """

    __slots__ = ()

    def __init__(self, items: Mapping[int, Value] | None = None) -> None:
        self.update(items or {})

    def __repr__(self) -> str:
        return f"Numbered({dict(self)})"
