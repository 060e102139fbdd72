"""C extension of torch programs: the short way of a collective whose call waits for it.

``_short.c`` and ``_tensors.h`` describe what is in it.

It is None where it was not built, or was built of another source. Then the same steps are taken in Python, and a small
collective takes longer.
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "remesh.carried.torch._short"
_NEEDED = ("Waiting", "Way", "Yes", "keep", "learn")


def _load() -> Any:
    try:
        found = importlib.import_module(NAME)
    except ImportError:
        return None
    return found if all(hasattr(found, name) for name in _NEEDED) else None


SHORT: Any = _load()
"""The extension; None where there is none that fits."""
