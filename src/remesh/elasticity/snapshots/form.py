"""Layout of a snapshot in shared memory: a header, a description, and the bytes.

    0      magic, complete (0 or 1), step, samples, line, length and CRC-32 of the description, length of the bytes
    64     description: JSON, one entry per tensor with its boxes and where its bytes begin, and the plain values
    ...    bytes of the tensors, each at a multiple of 64

``complete`` is written last, so that a writer that dies in the middle leaves nothing that can be taken for a snapshot.
A reader trusts nothing: lengths are checked against the memory, boxes against shapes, all before a byte is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.elasticity.snapshots.snapshot_header import HEAD, HEADER_BYTES, MAGIC
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import FormatError
from remesh.layout import Box, Shard
from remesh.layout.dtypes import ITEMSIZE_BYTES

ALIGN_BYTES = 64
MAX_DESCRIPTION_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a snapshot: a local tensor of some worker."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    """Shape of what is kept, row-major. Invariant: its bytes fit behind ``start``."""
    start: int
    """First byte, counted from the beginning of the bytes. Invariant: a multiple of ALIGN_BYTES."""
    shards: tuple[Shard, ...]
    """Boxes that it gives; holder 0 is a placeholder."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.local_shape) * ITEMSIZE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SnapshotDescription:
    """Everything of a snapshot but its bytes."""

    step: int
    """Batches behind the job. Invariant: >= 0."""
    samples: int
    entries: tuple[TensorEntry, ...]
    values: Mapping[str, Any]
    """Plain values, equal on all ranks."""
    line: int = 0
    """The generation in which the job last began or went back."""

    @property
    def data_bytes(self) -> int:
        return max((entry.start + entry.nbytes for entry in self.entries), default=0)


def plan_starts(sizes_bytes: Sequence[int]) -> list[int]:
    """Compute the offset of each tensor's bytes.

    >>> plan_starts([1, 64, 65])
    [0, 64, 128]
    """
    starts, at = [], 0
    for size in sizes_bytes:
        starts.append(at)
        at += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return starts


def write_description(snapshot: SnapshotDescription) -> bytes:
    """Header (not complete yet) and description, padded to where the bytes begin."""
    entries = [
        {
            "name": entry.name,
            "dtype": entry.dtype,
            "shape": entry.global_shape,
            "local": entry.local_shape,
            "start": entry.start,
            "shards": [
                [shard.box.start, shard.box.stop, shard.offset, shard.strides, shard.addend] for shard in entry.shards
            ],
        }
        for entry in snapshot.entries
    ]
    text = json.dumps({"entries": entries, "values": snapshot.values}, separators=(",", ":")).encode()
    head = HEAD.pack(
        MAGIC, 0, snapshot.step, snapshot.samples, snapshot.line, len(text), snapshot.data_bytes, crc32(text)
    ).ljust(HEADER_BYTES, b"\0")
    whole = head + text
    return whole.ljust(-(-len(whole) // ALIGN_BYTES) * ALIGN_BYTES, b"\0")


def read_description(memory: bytes | memoryview) -> tuple[SnapshotDescription, int] | None:
    """The snapshot in a memory, and where its bytes begin; None when none is complete there.

    FormatError when what is there is damaged.
    """
    if len(memory) < HEADER_BYTES:
        return None
    magic, complete, step, samples, line, length, data_bytes, crc = HEAD.unpack(bytes(memory[: HEAD.size]))
    if magic != MAGIC or complete != 1:
        return None
    data_start = -(-(HEADER_BYTES + length) // ALIGN_BYTES) * ALIGN_BYTES
    if not 0 <= length <= MAX_DESCRIPTION_BYTES or data_bytes < 0 or data_start + data_bytes > len(memory):
        raise _damaged(f"expected {data_start} + {data_bytes} bytes, the memory has {len(memory)}")
    text = bytes(memory[HEADER_BYTES : HEADER_BYTES + length])
    if crc32(text) != crc:
        raise _damaged("its description does not match the checksum in its header")
    try:
        fields = json.loads(text)
        entries = tuple(_entry_of(one) for one in fields["entries"])
        values = dict(fields["values"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(f"its description cannot be read: {error}") from error
    snapshot = SnapshotDescription(step, samples, entries, values, line)
    for entry in entries:
        if entry.start < 0 or entry.start % ALIGN_BYTES or entry.start + entry.nbytes > data_bytes:
            raise _damaged(f"tensor {entry.name!r} lies at {entry.start} with {entry.nbytes} of {data_bytes} bytes")
    return snapshot, data_start


def _entry_of(one: Mapping[str, Any]) -> TensorEntry:
    dtype = str(one["dtype"])
    if dtype not in ITEMSIZE_BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown")
    shards = tuple(
        Shard(0, Box(tuple(start), tuple(stop)), offset, None if strides is None else tuple(strides), addend)
        for start, stop, offset, strides, addend in one["shards"]
    )
    shapes = tuple(one["shape"]), tuple(one["local"])
    if any(not isinstance(size, int) or size < 0 for shape in shapes for size in shape):
        raise ValueError(f"shapes {shapes} are no shapes")
    return TensorEntry(str(one["name"]), dtype, *shapes, int(one["start"]), shards)


def _damaged(what: str) -> FormatError:
    return FormatError(
        "damaged-snapshot", f"reading a snapshot in shared memory: {what}; another source is used instead"
    )
