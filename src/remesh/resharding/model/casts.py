"""Dtype casts of a transfer, done where they leave the fewest bytes on the wire.

Definitions. A tensor is *held* in one dtype and *wanted* in another. It *travels* in the narrower of the two: a cast
that narrows is done by the giver that sends from its own memory, one that widens by the taker. So a relay passes bytes
on and never casts, every taker gets the value of exactly one cast, and the result is that of ``Tensor.to``.

Only casts that keep the meaning are made unasked: between floats, between complex numbers, and from integers to
integers that have room for all of them. Anything else is a clash.
"""

from __future__ import annotations

from remesh.layout import itemsize_bytes

_FLOATS = frozenset(
    {
        *("float64", "float32", "bfloat16", "float16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)
_COMPLEX = frozenset({"complex128", "complex64", "complex32"})
_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")


def travelling_dtype(held: str, wanted: str) -> str | None:
    """The dtype in which a tensor travels; None when a cast from ``held`` to ``wanted`` would lose its meaning.

    >>> travelling_dtype("float32", "bfloat16"), travelling_dtype("bfloat16", "float32")
    ('bfloat16', 'bfloat16')
    """
    if held == wanted:
        return held
    if not (_both(held, wanted, _FLOATS) or _both(held, wanted, _COMPLEX) or _has_room(held, wanted)):
        return None
    return wanted if itemsize_bytes(wanted) < itemsize_bytes(held) else held


def _both(a: str, b: str, kind: frozenset[str]) -> bool:
    return a in kind and b in kind


def _has_room(held: str, wanted: str) -> bool:
    wider = itemsize_bytes(wanted) > itemsize_bytes(held)
    if held in _UNSIGNED:
        return wider and wanted in (*_SIGNED, *_UNSIGNED)
    return wider and held in _SIGNED and wanted in _SIGNED
