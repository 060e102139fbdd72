"""Which classes may pickles name? Those that torch allows, those of NumPy's plain arrays, and what programs add."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from remesh.checkpoint.formats.data_file import SAFE_GLOBALS

__all__ = ["SAFE_GLOBALS", "SafeUnpickler", "register_safe_globals"]


def register_safe_globals() -> None:
    """Let ``torch.load(weights_only=True)`` build what checkpoints of this package hold."""
    torch.serialization.add_safe_globals(SAFE_GLOBALS)


class SafeUnpickler(pickle.Unpickler):
    """An unpickler that builds the classes of `SAFE_GLOBALS` and of ``torch.serialization.add_safe_globals`` only."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name; `pickle.UnpicklingError` for one that is not allowed."""
        for one in (*SAFE_GLOBALS, *torch.serialization.get_safe_globals()):
            allowed = one[0] if isinstance(one, tuple) else one
            path = one[1] if isinstance(one, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"
            if path == f"{module}.{name}":
                return allowed
        raise pickle.UnpicklingError(
            f"unpickling: found {module}.{name}, expected a class that is known to be safe; if the file is to be "
            "trusted, allow it with torch.serialization.add_safe_globals"
        )
