"""The entry point ``vllm.general_plugins``, by which each process of vLLM learns the name of the engines.

Trainers that import no part of vLLM's engine call `register` themselves. Nothing else is loaded before it is used.
"""

from __future__ import annotations

import contextlib
import importlib

_ENGINES = {
    "WeightTransferEngineFactory": "RemeshWorkerEngine",
    "WeightTransferTrainerFactory": "RemeshTrainerEngine",
}


def register() -> None:
    """Make ``backend="remesh"`` known to vLLM, in a release that has weight transfer. A second call does no harm."""
    try:
        factories = importlib.import_module("vllm.distributed.weight_transfer.factory")
    except ImportError:
        return
    for factory, engine in _ENGINES.items():
        if hasattr(factories, factory):
            with contextlib.suppress(ValueError):  # its own error when the name is there
                getattr(factories, factory).register_engine("remesh", "remesh.integrations.vllm", engine)
