"""Pack and Unpack: elements of a datatype to and from a buffer of packed bytes.

The plain form is ours and the same under every MPI library; the external one is MPI's external32: big-endian, values
apart without gaps. Source: MPI 4.1, sections 5.2 and 14.5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remesh.mpi.upper.basic_types import Basic
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.layouts import Layout
from remesh.mpi.upper.views import byte_view

Turn = Callable[[memoryview], memoryview]
"""From packed values to another form of them, or back."""


def as_they_are(packed: memoryview) -> memoryview:
    """The values in our own form."""
    return packed


def turned(packed: memoryview, leaf: Basic | None) -> memoryview:
    """Every value with its bytes turned round."""
    if leaf is None or leaf.kind == "P":
        raise failure("ERR_TYPE", "external32 of a datatype of several basic types is not supported")
    size = leaf.size // 2 if leaf.kind == "c" else leaf.size
    if leaf.kind in "SV" or size == 1:
        return packed
    result = bytearray(len(packed))
    for byte in range(size):
        result[byte::size] = packed[size - 1 - byte :: size]
    return memoryview(result)


def _whole(buffer: Any) -> memoryview:
    return byte_view(buffer[0] if isinstance(buffer, (list, tuple)) else buffer)[0]


def pack(layout: Layout, inbuf: Any, outbuf: Any, position: int, turn: Turn = as_they_are) -> int:
    """Put elements into ``outbuf`` from ``position`` on; the position behind them."""
    source, target = _whole(inbuf), _whole(outbuf)
    count = len(source) // layout.extent if layout.extent else 0
    packed = turn(memoryview(layout.pack(source, 0, count)))
    if position + len(packed) > len(target):
        raise failure("ERR_ARG", f"packing {len(packed)} bytes at {position} of {len(target)}")
    target[position : position + len(packed)] = packed
    return position + len(packed)


def unpack(layout: Layout, inbuf: Any, position: int, outbuf: Any, turn: Turn = as_they_are) -> int:
    """Take elements for all of ``outbuf`` out of ``inbuf`` from ``position`` on; the position behind them."""
    source, target = _whole(inbuf), _whole(outbuf)
    count = len(target) // layout.extent if layout.extent else 0
    num_bytes = count * layout.size
    if position + num_bytes > len(source):
        raise failure("ERR_TRUNCATE", f"unpacking {num_bytes} bytes at {position} of {len(source)}")
    layout.unpack(turn(source[position : position + num_bytes]), target, 0)
    return position + num_bytes
