"""Ways in which a file of torch is hurt, each at a place that chance chooses."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path


def shorten(path: Path, chance: random.Random) -> None:
    """Leave the begin of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def flip(path: Path, chance: random.Random) -> None:
    """Change a byte of a tensor."""
    with zipfile.ZipFile(path) as archive:
        held = [one for one in archive.infolist() if "/data/" in one.filename and one.file_size]
        with archive.open(chance.choice(held)) as record:
            first = record._orig_compress_start  # type: ignore[attr-defined]
            size = record._orig_file_size  # type: ignore[attr-defined]
    content = bytearray(path.read_bytes())
    content[first + chance.randrange(size)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def lose(path: Path, chance: random.Random) -> None:
    """Leave nothing of it."""
    path.unlink()
