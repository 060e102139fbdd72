"""How do a million integers travel in JSON without becoming a million words? As one text, of the narrowest width.

The text is a letter for the width, then the little-endian integers in base 64. Equal integers make equal texts, so
that texts can be compared in their stead.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_WIDTHS = {"b": "<i1", "h": "<i2", "i": "<i4", "q": "<i8"}
"""By letter, as NumPy calls them; the narrowest first."""


def pack(numbers: Sequence[int] | IntArray) -> str:
    """The integers, each of which fits 64 bits, as text.

    >>> pack([1, 2, 300])
    'hAQACACwB'
    """
    wide = np.asarray(numbers, dtype=np.int64)
    low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
    letter = next(one for one, kind in _WIDTHS.items() if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return letter + base64.b64encode(wide.astype(_WIDTHS[letter]).tobytes()).decode("ascii")


def unpack(text: str) -> IntArray:
    """What `pack` was given.

    >>> unpack("hAQACACwB").tolist()
    [1, 2, 300]
    """
    return np.frombuffer(base64.b64decode(text[1:]), dtype=_WIDTHS[text[0]]).astype(np.int64)
