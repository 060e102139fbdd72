"""The C extension of this room: the short way of a collective whose call waits for it. ``_short.c`` says what is in it.

It is None where it was not built. Then the same steps are taken in Python, and a small collective takes longer.
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "remesh.torch_programs._short"


def _load() -> Any:
    try:
        return importlib.import_module(NAME)
    except ImportError:
        return None


SHORT: Any = _load()
"""The extension; None where it was not built."""
