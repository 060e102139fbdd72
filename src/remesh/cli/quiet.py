"""What torch prints by itself and an agent does not want: its C++ side shows a stack trace for every lost store."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def import_quietly(name: str) -> ModuleType:
    """Import a module that loads torch, whose C++ side stays silent in this process unless the caller set its level.

    torch reads the variable when it is loaded; workers get the environment as it was.
    """
    if _LEVEL in os.environ:
        return importlib.import_module(name)
    os.environ[_LEVEL] = "FATAL"
    try:
        return importlib.import_module(name)
    finally:
        del os.environ[_LEVEL]
