"""Header of a snapshot, which agents read. `remesh.elasticity.snapshots.form` has the rest."""

from __future__ import annotations

import struct

HEADER_BYTES = 64
HEAD = struct.Struct("<8sB7xqqqqqI")
MAGIC = b"rmshsnp2"
COMPLETE_AT = 8
"""Where the byte ``complete`` stands."""


def read_step(memory: bytes | memoryview) -> int:
    """Step of the snapshot in a memory, by its header alone; -1 when none is complete there."""
    if len(memory) < HEADER_BYTES:
        return -1
    magic, complete, step, *_ = HEAD.unpack(bytes(memory[: HEAD.size]))
    return int(step) if magic == MAGIC and complete == 1 else -1
