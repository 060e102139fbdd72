"""Reductions: the operations of MPI and of the program, and how we fold operands ourselves.

The real MPI reduces what it can. Operations of the program, values it has no type for, and everything in *ordered*
mode (``REMESH_REDUCTIONS=ordered``) are gathered and folded here in the order of ranks, so that the result does not
depend on the MPI library, the network or the placement.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remesh.mpi.calls.table import REAL_OPS, REAL_TYPES
from remesh.mpi.upper.basic_types import BASIC, Basic, name_of_code, real_name
from remesh.mpi.upper.buffers import Spec, check_alike, parse
from remesh.mpi.upper.datatype import Datatype
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.memory import buffer

Function = Callable[[Any, Any, Datatype], None]


@functools.cache
def is_ordered() -> bool:
    """Whether all reductions are to be folded in the order of ranks."""
    return os.environ.get("REMESH_REDUCTIONS") == "ordered"


@dataclass(eq=False)
class _Op:
    """Content of an Op."""

    name: str  # of a predefined one, else ""
    commutes: bool
    on_values: Callable[[Any, Any], Any]  # for Python objects
    function: Function | None = None  # of the program: (operand, result, datatype) on memory

    @functools.cached_property
    def real_by_character(self) -> tuple[int, bytes] | None:
        """For plain buffers: number of the real operation, and of the real type for each character of a format, 255
        for none. None if we must fold ourselves.
        """
        return None if not self.name or is_ordered() else _by_character(self.name)


class Op(Handle):
    """A reduction operation; called with two Python objects it gives their reduction."""

    __slots__ = ()

    @property
    def _op(self) -> _Op:
        if self._h is None:
            raise failure("ERR_OP", "the operation is null or has been freed")
        content: _Op = self._h
        return content

    def __call__(self, x: Any, y: Any) -> Any:
        if self._h is None:
            raise ValueError("cannot call a null operation")
        op = self._op
        if op.function is not None:
            return op.function(x, y, None)  # type: ignore[arg-type]  # programs do return here
        return op.on_values(x, y)

    def _reduce(self) -> tuple[Any, ...]:
        if self._op.function is None:
            return type(self), ()
        return type(self).Create, (self._op.function, self._op.commutes)

    @classmethod
    def Create(cls, function: Function, commute: bool = False) -> Op:
        """An operation of the program's: ``function(operand, result, datatype)`` changes ``result``."""
        return cls._wrap(_Op("", bool(commute), lambda x, y: x, function))

    def Free(self) -> None:
        if self._op.name:
            raise failure("ERR_OP", "a predefined operation cannot be freed")
        self._h = None

    def Is_commutative(self) -> bool:
        return self._op.commutes

    is_commutative = property(Is_commutative)
    is_predefined = property(lambda self: self._h is None or bool(self._op.name))

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Fold ``inbuf`` into ``inoutbuf``."""
        operand, result = parse(inbuf), parse(inoutbuf)
        check_alike(operand, result)
        result.unpack(memoryview(self._fold([operand.payload(), result.payload()], result.datatype, result.count)))

    def _real(self, datatype: Datatype) -> tuple[int, int] | None:
        """Numbers of the real operation and type that can do it; None if we must."""
        op, kind = self._op, datatype._type
        leaf = kind.leaf
        if not op.name or leaf is None or leaf.size != kind.layout.size or is_ordered():
            return None
        return _numbers(op.name, leaf)

    def _is_for(self, leaf: Basic) -> bool:
        """Whether a predefined operation is defined for such values."""
        return _allowed(self._op.name, leaf)

    def _fold(self, operands: list[memoryview], datatype: Datatype, count: int) -> bytearray:
        """Operands (packed, in order of ranks) folded from the left: op(op(first, second), third) ..."""
        result = bytearray(operands[-1])
        if self._op.function is not None:
            for operand in reversed(operands[:-1]):
                self._apply(operand, result, datatype, count)
            return result
        if self._op.name == "NO_OP" or not result:
            return result
        leaf = datatype._type.leaf
        if leaf is None:
            raise failure("ERR_OP", f"MPI.{self._op.name} on a datatype of several basic types")
        if not _allowed(self._op.name, leaf):
            raise failure("ERR_OP", f"MPI.{self._op.name} is not defined for {leaf.name}")
        result[:] = operands[0]
        for operand in operands[1:]:
            _fold_basic(self._op, leaf, result, operand)
        return result

    def _apply(self, operand: memoryview, result: bytearray, datatype: Datatype, count: int) -> None:
        """The program's function sees memory as the datatype lays it out: result = operand (op) result."""
        function = self._op.function
        assert function is not None
        layout = datatype._layout
        if layout.is_dense:
            writable = bytearray(operand)
            function(buffer(writable), buffer(result), datatype)
            return
        low, high = layout.span(count)
        spread = [Spec(memoryview(bytearray(high - low)), -low, count, datatype) for _ in range(2)]
        spread[0].unpack(operand)
        spread[1].unpack(memoryview(result))
        function(buffer(spread[0].view), buffer(spread[1].view), datatype)
        result[:] = spread[1].payload()


def _allowed(name: str, leaf: Basic) -> bool:
    """Which operations are defined for which kinds. Source: MPI 4.1, section 6.9.2."""
    if name in ("MINLOC", "MAXLOC"):
        return leaf.kind == "P"
    if name in ("REPLACE", "NO_OP"):
        return True
    if leaf.name == "BYTE":
        return name.startswith("B")
    groups = {"S": "iuf", "P": "iuf", "M": "iuf", "L": "iub", "B": "iub"}
    return leaf.kind in groups[name[0]] or (leaf.kind == "c" and name in ("SUM", "PROD"))


@functools.cache
def _by_character(op_name: str) -> tuple[int, bytes] | None:
    if op_name not in REAL_OPS:
        return None
    types = bytearray(b"\xff" * 128)
    for code in range(128):
        name = name_of_code(chr(code))
        real = None if name is None else real_name(BASIC[name])
        if name is not None and real is not None and _allowed(op_name, BASIC[name]):
            types[code] = REAL_TYPES.index(real)
    return REAL_OPS.index(op_name), bytes(types)


@functools.cache
def _numbers(op_name: str, leaf: Basic) -> tuple[int, int] | None:
    name = real_name(leaf)
    if op_name not in REAL_OPS or name is None or leaf.kind == "P":
        return None
    if not _allowed(op_name, leaf):
        raise failure("ERR_OP", f"MPI.{op_name} is not defined for {leaf.name}")
    return REAL_OPS.index(op_name), REAL_TYPES.index(name)


_STRUCT_CHARS = {"i": "bhiq", "u": "BHIQ"}


def _struct_char(leaf: Basic) -> str | None:
    if leaf.kind in "iu":
        return _STRUCT_CHARS[leaf.kind][leaf.size.bit_length() - 1]
    return {("f", 2): "e", ("f", 4): "f", ("f", 8): "d", ("b", 1): "?"}.get((leaf.kind, leaf.size))


def _fold_basic(op: _Op, leaf: Basic, result: bytearray, operand: memoryview) -> None:
    """result = result (op) operand, value by value."""
    if op.name == "REPLACE":
        result[:] = operand
    elif leaf.kind == "P":
        _fold_pairs(op, leaf, result, operand)
    elif leaf.kind == "c" or leaf.size == 16 or (len(result) > 256 and "numpy" in sys.modules):
        _fold_arrays(op, leaf, result, operand)
    else:
        char = _struct_char(leaf)
        form = struct.Struct(f"={len(result) // leaf.size}{char}")
        pairs = zip(form.unpack(result), form.unpack(operand), strict=True)
        values = [op.on_values(a, b) for a, b in pairs]
        if leaf.kind in "iu":
            values = [_wrapped(value, leaf) for value in values]
        elif leaf.size == 4:
            # Python's floats are doubles: rounding once afterwards is exact for one sum or product.
            values = [_single(value) for value in values]
        form.pack_into(result, 0, *values)


def _wrapped(value: Any, leaf: Basic) -> int:
    bits = 8 * leaf.size
    number = int(value) & ((1 << bits) - 1)
    return number - (1 << bits) if leaf.kind == "i" and number >> (bits - 1) else number


def _single(value: float) -> float:
    try:
        return float(struct.unpack("=f", struct.pack("=f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _fold_arrays(op: _Op, leaf: Basic, result: bytearray, operand: memoryview) -> None:
    import numpy as np  # noqa: PLC0415 - optional for programs; complex and long double values need it

    kinds = {"b": "?", "c": f"c{leaf.size}"}
    dtype = np.dtype(kinds.get(leaf.kind, f"{leaf.kind}{leaf.size}"))
    left, right = np.frombuffer(result, dtype), np.frombuffer(operand, dtype)
    function: dict[str, Any] = {
        "SUM": np.add,
        "PROD": np.multiply,
        "MAX": np.maximum,
        "MIN": np.minimum,
        "LAND": np.logical_and,
        "LOR": np.logical_or,
        "LXOR": np.logical_xor,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
    with np.errstate(all="ignore"):
        left[:] = function[op.name](left, right)


def _fold_pairs(op: _Op, leaf: Basic, result: bytearray, operand: memoryview) -> None:
    if not leaf.pair:
        raise failure("ERR_OP", f"MPI.{op.name} on {leaf.name} is not supported")
    form = struct.Struct("=" + leaf.pair.replace("x", ""))
    folded = [
        op.on_values(left, right)
        for left, right in zip(form.iter_unpack(result), form.iter_unpack(operand), strict=True)
    ]
    for index, pair in enumerate(folded):
        form.pack_into(result, index * form.size, *pair)


def _minloc(x: Any, y: Any) -> Any:
    """Of (value, index) pairs the smaller value; of equal ones the smaller index."""
    return min(x, y) if x[0] == y[0] else (x if x[0] < y[0] else y)


def _maxloc(x: Any, y: Any) -> Any:
    return min(x, y, key=lambda pair: pair[1]) if x[0] == y[0] else (x if x[0] > y[0] else y)


_TABLE: dict[str, Callable[[Any, Any], Any]] = {
    "MAX": lambda x, y: y if y > x else x,
    "MIN": lambda x, y: y if y < x else x,
    "SUM": lambda x, y: x + y,
    "PROD": lambda x, y: x * y,
    "LAND": lambda x, y: bool(x) & bool(y),
    "BAND": lambda x, y: x & y,
    "LOR": lambda x, y: bool(x) | bool(y),
    "BOR": lambda x, y: x | y,
    "LXOR": lambda x, y: bool(x) ^ bool(y),
    "BXOR": lambda x, y: x ^ y,
    "MINLOC": _minloc,
    "MAXLOC": _maxloc,
    "REPLACE": lambda x, y: y,
    "NO_OP": lambda x, y: x,
}
OPS = {name: Op._wrap(_Op(name, name != "REPLACE", function)) for name, function in _TABLE.items()}
"""The predefined operations by name."""
OP_NULL = Op()
