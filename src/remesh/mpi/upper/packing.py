"""Pack and Unpack: elements of a datatype to and from a buffer of packed bytes.

The plain form is ours and the same under every MPI library; the external one is MPI's external32: big-endian, values
apart without gaps. Source: MPI 4.1, sections 5.2 and 14.5.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.views import byte_view

if TYPE_CHECKING:
    from remesh.mpi.upper.datatype import Datatype


def _swapped(packed: memoryview, datatype: Datatype) -> memoryview:
    """Every value with its bytes turned round."""
    leaf = datatype._type.leaf
    if leaf is None or leaf.kind == "P":
        raise failure("ERR_TYPE", "external32 of a datatype of several basic types is not supported")
    size = leaf.size // 2 if leaf.kind == "c" else leaf.size
    if leaf.kind in "SV" or size == 1:
        return packed
    turned = bytearray(len(packed))
    for byte in range(size):
        turned[byte::size] = packed[size - 1 - byte :: size]
    return memoryview(turned)


def _whole(buffer: Any) -> memoryview:
    return byte_view(buffer[0] if isinstance(buffer, (list, tuple)) else buffer)[0]


def pack(datatype: Datatype, inbuf: Any, outbuf: Any, position: int, external: bool = False) -> int:
    """Put elements into ``outbuf`` from ``position`` on; the position behind them."""
    source, target, layout = _whole(inbuf), _whole(outbuf), datatype._layout
    count = len(source) // layout.extent if layout.extent else 0
    packed = memoryview(layout.pack(source, 0, count))
    if external:
        packed = _swapped(packed, datatype)
    if position + len(packed) > len(target):
        raise failure("ERR_ARG", f"packing {len(packed)} bytes at {position} of {len(target)}")
    target[position : position + len(packed)] = packed
    return position + len(packed)


def unpack(datatype: Datatype, inbuf: Any, position: int, outbuf: Any, external: bool = False) -> int:
    """Take elements for all of ``outbuf`` out of ``inbuf`` from ``position`` on; the position behind them."""
    source, target, layout = _whole(inbuf), _whole(outbuf), datatype._layout
    count = len(target) // layout.extent if layout.extent else 0
    num_bytes = count * layout.size
    if position + num_bytes > len(source):
        raise failure("ERR_TRUNCATE", f"unpacking {num_bytes} bytes at {position} of {len(source)}")
    packed = source[position : position + num_bytes]
    layout.unpack(_swapped(packed, datatype) if external else packed, target, 0)
    return position + num_bytes
