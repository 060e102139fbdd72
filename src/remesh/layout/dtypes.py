"""Names of dtypes, and their sizes in bytes.

The names are torch's without the module (``"float32"``, ``"bfloat16"``, ``"float8_e4m3fn"``); where torch and
NumPy agree on a name, the name is NumPy's too. A layout never needs the values of a dtype, only its width.
"""

from __future__ import annotations

from remesh.foundation.errors import LayoutError

ITEMSIZE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "quint8": 1,
    "qint8": 1,
    "qint32": 4,
}
"""Bytes of one element as torch stores it; two packed 4-bit floats count as one element."""


def itemsize_bytes(dtype: str) -> int:
    """Bytes of one element of this dtype.

    >>> itemsize_bytes("bfloat16")
    2
    """
    found = ITEMSIZE_BYTES.get(dtype)
    if found is None:
        raise LayoutError(
            f"looking up dtype {dtype!r}: it is not among the {len(ITEMSIZE_BYTES)} known names "
            f"({', '.join(sorted(ITEMSIZE_BYTES))}); use torch's name without 'torch.'"
        )
    return found
