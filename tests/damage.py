"""Files that are not as they were written."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def damaged(path: Path, chance: random.Random) -> Iterator[str]:
    """A bit of a file is flipped, or its end is missing, as is said; it is whole again after that."""
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        at = chance.randrange(size)
        file.seek(at)
        end = file.read() if chance.random() < 0.3 else b""
        file.seek(at)
        byte = end[:1] or file.read(1)
        file.seek(at)
        if end:
            file.truncate()
        else:
            file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
        try:
            yield f"cut at {at}" if end else f"flipped at {at}"
        finally:
            file.seek(at)
            file.write(end or byte)
