"""Suppression of what torch does by itself when it is loaded, and an agent does not want.

Its C++ side shows a stack trace for every lost store, and its compiler leaves variables in the environment, which
workers would get that do not get them under torchrun. It also makes some 200,000 objects that stay for good, and Python
looks for garbage among them, when they are made and when the process ends, for a fifth of its time.
"""

from __future__ import annotations

import gc
import importlib
import os
from types import ModuleType

from remesh.foundation.collector import collector_at_rest

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def import_quietly(name: str) -> ModuleType:
    """Import a module that loads torch, whose C++ side stays silent in this process unless the caller set its level.

    torch reads the variable when it is loaded. The environment is afterwards as it was, and the collector of garbage
    passes over all that there is by then.
    """
    before = set(os.environ)
    os.environ.setdefault(_LEVEL, "FATAL")
    try:
        with collector_at_rest():
            module = importlib.import_module(name)
        gc.freeze()
        return module
    finally:
        for added in set(os.environ) - before:
            del os.environ[added]
