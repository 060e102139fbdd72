"""Checksums and compression of pages: by ISA-L where the package ``isal`` is installed, or by zlib, to the same forms.

The checksum of a page is the CRC-32 of both, and either unpacks what the other has packed. ISA-L computes it more than
ten times as fast, so that the processor has nothing to do but copying while the disk writes.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Final

try:
    import isal
    from isal import isal_zlib
except ImportError:
    isal = None  # type: ignore[assignment]

_LEVEL: Final = 1
"""Higher levels cost several times the time for a few per cent."""


def crc32(data: bytes | memoryview) -> int:
    """The CRC-32 of the data."""
    return zlib.crc32(data) if isal is None else isal_zlib.crc32(data)


def compress(data: memoryview) -> bytes:
    """The data in zlib's form (RFC 1950)."""
    return zlib.compress(data, _LEVEL) if isal is None else isal_zlib.compress(data, _LEVEL)


def search_path() -> str:
    """The folder in which a Python without ``site`` finds ISA-L; "" where there is none."""
    return "" if isal is None else os.fspath(Path(isal.__file__).parents[1])
