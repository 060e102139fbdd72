"""Strategies for common data, which lie in ``common.pt``, and for objects in files of their own.

An object that no strategy for sharded data takes lies in ``{unique key}.pt``, where the key may hold ``/``.
"""

from __future__ import annotations

from collections.abc import Iterator

from remesh.checkpoint.errors import CheckpointFormatError
from remesh.checkpoint.formats.data_file import dump_object, load_object
from remesh.checkpoint.formats.directory import COMMON_STATE_FNAME, load_common, save_common
from remesh.checkpoint.storage import Directory, Location, location_of, store_of
from remesh.checkpoint.values.entities import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from remesh.checkpoint.values.nests import dict_list_map_outplace, nested_values
from remesh.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    ReadsOneFormat,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
)

__all__ = [
    "COMMON_STATE_FNAME",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "load_common",
    "register_default_common_strategies",
    "save_common",
]

_BACKEND, _VERSION = "torch", 1
_SUFFIX = ".pt"


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes common data to ``common.pt``, and objects to files of their own."""

    def __init__(self, backend: str = _BACKEND, version: int = _VERSION) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Directory) -> None:
        save_common(common_state_dict, checkpoint_dir)

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        for element in nested_values(sharded_objects_state_dict):
            if is_main_replica(element.replica_id):
                path = _object_path(location_of(checkpoint_dir), element.unique_key)
                store_of(path).make_directory(path.parent)
                store_of(path).put(path, dump_object(element.data, f"object {element.unique_key!r}"))


class TorchCommonLoadStrategy(ReadsOneFormat, LoadCommonStrategy):
    """Reads what `TorchCommonSaveStrategy` writes."""

    _backend, _version = _BACKEND, _VERSION

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        return load_common(checkpoint_dir)

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> StateDict:
        loaded: StateDict = dict_list_map_outplace(
            lambda element: _load_element(element, location_of(checkpoint_dir)), sharded_objects_state_dict
        )
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedObject]:
        names = sorted(_object_names(location_of(checkpoint_dir)))
        return {name: ShardedObject.empty_from_unique_key(name) for name in names}


def _load_element(element: ShardedObject, directory: Location) -> object:
    path = _object_path(directory, element.unique_key)
    if store_of(path).size_of(path) is None and len(element.global_shape) > 1:
        # Older writers left the last size of the shape out of the name.
        path = _object_path(directory, element.unique_key.rpartition(".")[0])
    try:
        content = store_of(path).read(path)
    except FileNotFoundError as raised:
        raise CheckpointFormatError(
            "missing-file",
            f"loading object {element.unique_key!r}: {path} does not exist; the checkpoint is incomplete or never "
            "had this object",
        ) from raised
    return load_object(content, str(path))


def _object_names(directory: Location, prefix: str = "") -> Iterator[str]:
    """Names of the files of objects below a directory, without their suffix."""
    for entry in store_of(directory).entries(directory):
        if not entry.is_file:
            yield from _object_names(directory / entry.name, f"{prefix}{entry.name}/")
        elif entry.name.startswith("shard_") and entry.name.endswith(_SUFFIX):
            yield prefix + entry.name.removesuffix(_SUFFIX)


def _object_path(directory: Location, unique_key: str) -> Location:
    path = directory / f"{unique_key}{_SUFFIX}"
    if not store_of(directory).is_inside(directory, path):
        raise CheckpointFormatError(
            "escaping-path", f"placing object {unique_key!r}: its file would lie outside {directory}; rename its key"
        )
    return path


def register_default_common_strategies() -> None:
    """Make these strategies the default ones for common data, as they are from the start."""
    register_default_strategy(StrategyAction.SAVE_COMMON, _BACKEND, _VERSION, TorchCommonSaveStrategy())
    register_default_strategy(StrategyAction.LOAD_COMMON, _BACKEND, _VERSION, TorchCommonLoadStrategy())


register_default_common_strategies()
