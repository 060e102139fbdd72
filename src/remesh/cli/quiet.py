"""What torch does by itself when it is loaded, and an agent does not want.

Its C++ side shows a stack trace for every lost store, and its compiler leaves variables in the environment, which
workers would get that do not get them under torchrun.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def import_quietly(name: str) -> ModuleType:
    """Import a module that loads torch, whose C++ side stays silent in this process unless the caller set its level.

    torch reads the variable when it is loaded. The environment is afterwards as it was.
    """
    before = set(os.environ)
    os.environ.setdefault(_LEVEL, "FATAL")
    try:
        return importlib.import_module(name)
    finally:
        for added in set(os.environ) - before:
            del os.environ[added]
