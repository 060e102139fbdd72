"""Names that users of torch's planner and of models import: thin faces that save and load the same values."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.dict_utils import dict_map, dict_map_with_key, nested_items_iter
from remesh.dist_checkpointing.model_entities import (
    make_sharded_object_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from remesh.dist_checkpointing.safe_globals import SafeUnpickler
from remesh.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from remesh.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from remesh.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from remesh.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    flatten_state_dict,
    get_reformulation_metadata,
    mcore_to_pyt_state_dict,
)
from remesh.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from remesh.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict


def half(at: int, values: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", values, (0, at, 2))


def test_native_torch_saves_and_loads_sharded_tensors(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    shards = LocalShardsContainer(
        [CheckpointableShardedTensor.from_sh_ten(half(at, whole[2 * at :][:2])) for at in (0, 1)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": shards}, checkpoint_id=tmp_path, no_dist=True)
        got = torch.zeros(2, 3)
        wanted = mcore_to_pyt_state_dict({"w": [half(1, got)]}, is_loading=True)
        reader = CachedMetadataFileSystemReader(tmp_path)
        dcp.load(wanted, storage_reader=reader, planner=MCoreLoadPlanner(), no_dist=True)
    assert torch.equal(got, whole[2:])
    assert CachedMetadataFileSystemReader(tmp_path).read_metadata() is reader.read_metadata()
    CachedMetadataFileSystemReader.clear_metadata_cache()


def test_zarr_goes_by_its_old_names_too(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": half(0, torch.ones(2, 3)), "v": half(1, torch.zeros(2, 3))}, tmp_path, ("zarr", 1))
    for strategy in (TensorStoreLoadShardedStrategy(), TwoStageDataParallelLoadShardedStrategy(None)):
        got = torch.zeros(2, 3)
        dist_checkpointing.load({"w": half(0, got)}, tmp_path, strategy, validate_access_integrity=False)
        assert got.eq(1).all()


def test_a_module_is_described_tensor_by_tensor() -> None:
    module = torch.nn.Linear(4, 2)
    described = sharded_state_dict_default(module, "layer.", [(0, 1, 3)])
    assert described["layer.weight"].data is module.weight
    assert described["layer.weight"].global_shape == (3, 2, 4)
    assert described["layer.bias"].global_offset == (1, 0)
    extra: Any = make_sharded_tensors_for_checkpoint({"_extra_state": 1}, "layer.", sharded_offsets=[(0, 1, 3)])
    assert extra["layer._extra_state"].unique_key == "layer._extra_state/shard_1_3"
    assert make_sharded_object_for_checkpoint(1, "o").unique_key == "o/shard_0_1"


def test_a_tensor_aware_state_dict_gives_its_tensors_away_and_takes_them_back() -> None:
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0)),
        "o": ShardedObject("o", 5, (1,), (0,)),
        "n": 1,
    }
    aware, cached = MCoreTensorAwareStateDict.from_state_dict(state, algo="atomic")
    assert cached is None
    taken = aware.pop_tensors()
    assert aware.is_hollow and taken[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointingException, match="taken out"):
        aware.to_state_dict({})
    aware.insert_tensors(taken)
    aware.copy_tensors_to_cpu()
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4)), "o": ShardedObject("o", None, (1,), (0,))}
    result = aware.to_state_dict(wanted)
    assert (result["w"].tolist(), result["o"], result["n"]) == ([0, 1, 2, 3], 5, 1)


def test_flat_dicts_and_walks(tmp_path: Path) -> None:
    assert flatten_state_dict({"a": {"b": 1}, "c": [2]}) == ({"a.b": 1, "c.0": 2}, {"a.b": ("a", "b"), "c.0": ("c", 0)})
    with pytest.raises(ValueError, match="duplicated flatten key a.b"):
        flatten_state_dict({"a.b": 1, "a": {"b": 2}})
    values = {"x": 1, "y": 2}
    dict_map(lambda value: value + 1, values)
    dict_map_with_key(lambda key, value: f"{key}{value}", values)
    assert values == {"x": "x2", "y": "y3"}
    assert [(key, leaf) for _, key, leaf in nested_items_iter({"a": [1], "b": 2})] == [(0, 1), ("b", 2)]
    flat = ShardedTensor.from_rank_offsets_flat("f", torch.ones(6), (2, 3), flattened_range=slice(0, 6))
    dist_checkpointing.save({"f": flat}, tmp_path)
    assert get_reformulation_metadata({"f": flat}, tmp_path)["f"].ckpt_reform_global_shape == (1, 1, 6)


def test_the_safe_unpickler_builds_nothing_else() -> None:
    with pytest.raises(pickle.UnpicklingError, match="expected a class that is known to be safe"):
        SafeUnpickler(io.BytesIO(pickle.dumps(Path("x")))).load()
    assert SafeUnpickler(io.BytesIO(pickle.dumps({"a": [1, "b"]}))).load() == {"a": [1, "b"]}
