"""Names of torch's planner that users of the format import; each is a thin face of what this package does itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata, SavePlan

from remesh.dist_checkpointing.dict_utils import nested_leaves
from remesh.dist_checkpointing.errors import CheckpointingException
from remesh.dist_checkpointing.flattened import stored_form
from remesh.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from remesh.dist_checkpointing.storage import Directory, location_of
from remesh.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from remesh.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from remesh.dist_checkpointing.strategies.resharding import TensorReformulationMetadata
from remesh.dist_checkpointing.strategies.torch_format import read_manifest

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
    """torch's planner, for saving what `mcore_to_pyt_state_dict` returns with native torch."""


class MCoreLoadPlanner(DefaultLoadPlanner):
    """torch's planner, for loading into what `mcore_to_pyt_state_dict` returns with native torch.

    Tensors named in ``allow_shape_mismatch_sharded_tensors`` are refused: only this package's own load cuts and pads.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: dict[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if allow_shape_mismatch_sharded_tensors:
            raise CheckpointingException(
                f"making a planner of torch: found tensors {sorted(allow_shape_mismatch_sharded_tensors)} whose shapes "
                "may differ, expected none; load them with dist_checkpointing.load"
            )
        self.shapes_validation_sharded_tensors = list(shapes_validation_sharded_tensors)


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


def get_reformulation_metadata(
    sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory
) -> dict[str, TensorReformulationMetadata]:
    """Of every flattened tensor of the request, its global shapes before flattening and as stored."""
    manifest = read_manifest(location_of(checkpoint_dir))
    wanted = {
        leaf.key
        for _, leaf in nested_leaves(sharded_state_dict)
        if isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None
    }
    return {
        key: TensorReformulationMetadata(shape, manifest.tensors[key].global_shape)
        for key, shape in manifest.unflattened_shapes.items()
        if key in wanted
    }


def get_async_strategy(async_strategy: str = "mcore", module: Any = None) -> tuple[str, Any]:
    """Who saves in the background: always this package, whatever was asked for."""
    return "mcore", module


def _get_filesystem_reader(checkpoint_dir: str, cache_metadata: bool = False) -> CachedMetadataFileSystemReader:
    return CachedMetadataFileSystemReader(checkpoint_dir, cache_metadata)
