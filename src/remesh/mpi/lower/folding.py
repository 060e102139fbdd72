"""What does an access leave behind at its target?

Plain values are folded by the real MPI: ``Reduce_local`` needs no other rank. Values with an index are not, since their
gaps differ from MPI to MPI.
"""

from __future__ import annotations

import struct
from typing import Any

from remesh.mpi.calls.table import PAIR_FORMATS, REAL_OPS, REAL_TYPES
from remesh.mpi.lower.accesses import COMPARE_AND_SWAP, REPLACE, Data, Verb


class Folder:
    """Computes it, with the MPI module ``mpi``."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def fold(self, verb: Verb, old: bytearray, data: Data) -> Data:
        """The new bytes. ValueError if the lengths do not fit; MPI's exception if it does not know the operation."""
        if verb.op == COMPARE_AND_SWAP:
            new, expected = data[: len(old)], data[len(old) :]
            _check_length(expected, old)
            return new if bytes(expected) == old else old
        _check_length(data, old)
        if verb.op == REPLACE:
            return data
        name = REAL_TYPES[verb.type]
        if name in PAIR_FORMATS:
            return fold_pairs(REAL_OPS[verb.op], PAIR_FORMATS[name], old, data)
        datatype = getattr(self._mpi, name)
        result = bytearray(old)
        getattr(self._mpi, REAL_OPS[verb.op]).Reduce_local([bytearray(data), datatype], [result, datatype])
        return result


def _check_length(data: Data, old: bytearray) -> None:
    if len(data) != len(old):
        raise ValueError(f"{len(data)} bytes of data for {len(old)} at the target")


def fold_pairs(op: str, form: str, old: bytearray, data: Data) -> bytes:
    """MINLOC or MAXLOC on (value, index) pairs without gaps; of equal values the smaller index stays.

    >>> struct.unpack("=ii", fold_pairs("MAXLOC", "=ii", bytearray(struct.pack("=ii", 5, 7)), struct.pack("=ii", 5, 3)))
    (5, 3)
    """
    if op not in ("MINLOC", "MAXLOC"):
        raise ValueError(f"{op} on values with an index, expected MINLOC or MAXLOC")
    sign = 1 if op == "MINLOC" else -1
    pairs = zip(struct.iter_unpack(form, old), struct.iter_unpack(form, data), strict=True)
    return b"".join(struct.pack(form, *min(pair, key=lambda one: (sign * one[0], one[1]))) for pair in pairs)
