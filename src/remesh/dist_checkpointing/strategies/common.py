"""Strategies for common data, which lies in ``common.pt``."""

from __future__ import annotations

from remesh.checkpoint.formats.directory import (
    COMMON_STATE_FNAME as COMMON_STATE_FNAME,
    load_common as load_common,
    save_common as save_common,
)
from remesh.checkpoint.storage import Directory
from remesh.checkpoint.values.entities import StateDict
from remesh.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
)

_BACKEND, _VERSION = "torch", 1


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes common data."""

    def __init__(self, backend: str = _BACKEND, version: int = _VERSION) -> None:
        super().__init__(backend, version)

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Directory) -> None:
        save_common(common_state_dict, checkpoint_dir)


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Reads what `TorchCommonSaveStrategy` writes."""

    _reads = (_BACKEND, _VERSION)

    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        return load_common(checkpoint_dir)


def register_default_common_strategies() -> None:
    """Make these strategies the default ones for common data, as they are from the start."""
    register_default_strategy(StrategyAction.SAVE_COMMON, _BACKEND, _VERSION, TorchCommonSaveStrategy())
    register_default_strategy(StrategyAction.LOAD_COMMON, _BACKEND, _VERSION, TorchCommonLoadStrategy())


register_default_common_strategies()
