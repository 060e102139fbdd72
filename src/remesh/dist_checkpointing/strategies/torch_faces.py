"""Names of torch's planner that users of the format import; each is a thin face of what this package does itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError
from remesh.checkpoint.plan.flattened import stored_form
from remesh.checkpoint.values.entities import ShardedObject, ShardedStateDict, ShardedTensor, is_main_replica
from remesh.checkpoint.values.nests import items_of, nested_leaves
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from remesh.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from remesh.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from remesh.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    _results_queue,
    get_write_results_queue,
)
from remesh.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

__all__ = [
    "MCoreLoadPlanner",
    "MCoreMetadata",
    "MCoreSavePlan",
    "MCoreSavePlanner",
    "_get_filesystem_reader",
    "_replace_sharded_keys_with_state_dict_keys",
    "_replace_state_dict_keys_with_sharded_keys",
    "_restore_dict_types",
    "_unwrap_pyt_sharded_tensor",
    "flatten_state_dict",
    "get_async_strategy",
    "mcore_to_pyt_state_dict",
    "sharded_tensor_to_torch_sharded_tensor",
]

_Path = tuple[Any, ...]


@dataclass
class MCoreMetadata(Metadata):
    """The class that some writers have used for the index; it is never written here."""

    mcore_data: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    """The class that some writers have used for their plans."""

    mcore_data: dict[str, dict[str, Any]] = field(default_factory=dict)


class MCoreSavePlanner(DefaultSavePlanner):
    """torch's planner, for saving what `mcore_to_pyt_state_dict` returns with native torch.

    ``nd_flattened_global_shapes`` is refused: only this package's own save records what was flattened.
    """

    def __init__(
        self,
        *args: Any,
        nd_flattened_global_shapes: Mapping[str, tuple[int, ...]] | None = None,
        can_run_decentralized_global_plan: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if nd_flattened_global_shapes:
            raise CheckpointingException(
                f"making a planner of torch: found flattened tensors {sorted(nd_flattened_global_shapes)}, expected "
                "none; save them with dist_checkpointing.save"
            )
        self.can_run_decentralized_global_plan = can_run_decentralized_global_plan


class MCoreLoadPlanner(DefaultLoadPlanner):
    """torch's planner, for loading into what `mcore_to_pyt_state_dict` returns with native torch.

    Tensors named in ``allow_shape_mismatch_sharded_tensors`` may be stored in another global shape: what both shapes
    have is loaded, the rest is zero. The shapes of ``shapes_validation_sharded_tensors`` must be those of the file.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = list(shapes_validation_sharded_tensors)
        self.allow_shape_mismatch_sharded_tensors = dict(allow_shape_mismatch_sharded_tensors or {})

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        for one in self.shapes_validation_sharded_tensors:
            found = getattr(entries.get(one.key), "size", None)
            if found is not None and tuple(found) != one.global_shape and not one.allow_shape_mismatch:
                raise CheckpointMismatchError(
                    f"Global shape mismatch for loaded ({tuple(found)}) and expected ({one.global_shape}) tensor for "
                    f"key {one.key}"
                )
        resized = {}
        for key, one in self.allow_shape_mismatch_sharded_tensors.items():
            entry = entries.get(key)
            if isinstance(entry, TensorStorageMetadata):
                resized[key] = replace(entry, size=torch.Size(one.global_shape))
                if one.data is not None:
                    one.data.detach().zero_()
        self.metadata = replace(self.metadata, state_dict_metadata={**entries, **resized})
        return super().create_local_plan()


def flatten_state_dict(state_dict: ShardedStateDict) -> tuple[dict[str, Any], dict[str, _Path]]:
    """Every leaf by its path joined with dots, and the path of each."""
    flat: dict[str, Any] = {}
    paths: dict[str, _Path] = {}
    for path, leaf in nested_leaves(state_dict):
        name = ".".join(map(str, path))
        if name in flat:
            raise ValueError(f"duplicated flatten key {name}")
        flat[name], paths[name] = leaf, path
    return flat, paths


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: list[ShardedTensor], rank: int | None = None, load_legacy_1d_flatten_tensors: bool = False
) -> LocalShardsContainer:
    """Shards of one key in the form in which native torch saves and loads them; flat slices in their stored form."""
    stored = [stored_form(one) if one.flattened_range is not None else one for one in sh_tens]
    return LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(one) for one in stored])


def mcore_to_pyt_state_dict(
    state_dict: dict[str, list[ShardedTensor] | list[ShardedObject]],
    is_loading: bool = False,
    init_device: Any = "cpu",
    load_legacy_1d_flatten_tensors: bool = False,
) -> dict[str, Any]:
    """Lists of entities by key in the form in which native torch saves and loads them."""
    converted: dict[str, Any] = {}
    for key, entities in state_dict.items():
        tensors = [one for one in entities if isinstance(one, ShardedTensor)]
        if not tensors:
            converted[key] = [one.data for one in entities]
            continue
        for one in tensors:
            if is_loading:
                one.init_data(init_device)
        converted[key] = sharded_tensor_to_torch_sharded_tensor(tensors)
    return converted


def _replace_state_dict_keys_with_sharded_keys(
    sharded_state_dict: ShardedStateDict, keep_only_main_replica: bool = False
) -> tuple[dict[str, list[Any]], dict[str, _Path], dict[str, list[str]]]:
    """Entities by key, objects by unique key; the path of each flat name; and the flat names of each key."""
    flat, paths = flatten_state_dict(sharded_state_dict)
    by_key: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for name, entity in flat.items():
        if not keep_only_main_replica or is_main_replica(entity.replica_id):
            key = entity.unique_key if isinstance(entity, ShardedObject) else entity.key
            by_key.setdefault(key, []).append(entity)
            names.setdefault(key, []).append(name)
    return by_key, paths, names


def _replace_sharded_keys_with_state_dict_keys(
    state_dict: dict[str, list[Any]], flat_mapping: dict[str, _Path], rename_mapping: dict[str, list[str]]
) -> dict[Any, Any]:
    """The nest in which every value of a key stands at its path again; containers are dicts."""
    nest: dict[Any, Any] = {}
    for key, values in state_dict.items():
        for name, value in zip(rename_mapping[key], values, strict=True):
            *above, last = flat_mapping[name]
            node = nest
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
    return nest


def _restore_dict_types(x: Any, keys_template: Any) -> None:
    """Give the keys of a nest, in place, the types that they have in the template; a list may be a dict by number."""
    for key, inner in items_of(keys_template):
        if isinstance(x, dict) and key not in x:
            x[key] = x.pop(str(key))
        if isinstance(inner, dict | list):
            _restore_dict_types(x[key], inner)
        if isinstance(inner, list) and isinstance(x[key], dict):
            x[key] = [x[key][number] for number in range(len(inner))]


def _unwrap_pyt_sharded_tensor(sh_ten: Any) -> list[torch.Tensor]:
    """The tensors or objects in what `mcore_to_pyt_state_dict` has made, as the entities hold them."""
    if not isinstance(sh_ten, LocalShardsContainer):
        return list(sh_ten)
    return [one.data.detach() for one in sh_ten._shards if one.data is not None]


_BACKGROUND = {
    "AsyncCallsQueue": AsyncCallsQueue,
    "AsyncRequest": AsyncRequest,
    "CachedMetadataFileSystemReader": CachedMetadataFileSystemReader,
    "FileSystemWriterAsync": FileSystemWriterAsync,
    "_results_queue": _results_queue,
    "get_write_results_queue": get_write_results_queue,
    "save_state_dict_async_finalize": save_state_dict_async_finalize,
    "save_state_dict_async_plan": save_state_dict_async_plan,
}
"""What a background save of DTensor state dicts is made of, by name."""


def get_async_strategy(async_strategy: str = "mcore", module: str | None = None) -> tuple[str, Any]:
    """The functions of background saves, always those of this package: all by name, or the one of ``module``."""
    if async_strategy not in ("mcore", "nvrx") or (module is not None and module not in _BACKGROUND):
        raise TypeError(
            f"choosing the writer of background saves: found async_strategy {async_strategy!r} and module {module!r}, "
            f"expected 'mcore' or 'nvrx', and None or one of {', '.join(_BACKGROUND)}"
        )
    return "mcore", dict(_BACKGROUND) if module is None else _BACKGROUND[module]


def _get_filesystem_reader(
    checkpoint_dir: str, cache_metadata: bool = False, async_strategy: str | None = None
) -> CachedMetadataFileSystemReader:
    return CachedMetadataFileSystemReader(checkpoint_dir, cache_metadata)
