"""Names that users of torch's planner and of models import: thin faces that save and load the same values."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedObject, ShardedTensor, tensor_aware_state_dict
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.dict_utils import dict_map, dict_map_with_key, nested_items_iter
from remesh.dist_checkpointing.gpt_checkpoint_interop import gpt_compatible_layer_maps
from remesh.dist_checkpointing.strategies.async_utils import AsyncRequest, _disable_gc, _set_process_qos
from remesh.dist_checkpointing.strategies.base import choose_save_strategy
from remesh.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from remesh.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from remesh.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, _results_queue
from remesh.dist_checkpointing.strategies.nvrx import make_nvrx_async_request
from remesh.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from remesh.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from remesh.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    flatten_state_dict,
    get_async_strategy,
    mcore_to_pyt_state_dict,
)
from remesh.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from remesh.dist_checkpointing.utils import zip_strict
from remesh.dist_checkpointing.validation import validate_sharding_integrity, verify_integrity_manifest


@pytest.mark.parametrize("wanted", ["mcore", "nvrx"])
def test_a_training_loop_saves_in_the_background_with_what_the_strategy_names(tmp_path: Path, wanted: str) -> None:
    name, modules = get_async_strategy(wanted)
    assert name == "mcore" and modules["get_write_results_queue"](mp_mode="fork") is None is _results_queue
    assert get_async_strategy(wanted, "AsyncRequest") == (name, AsyncRequest)
    state = {"w": torch.arange(3.0)}
    writer = modules["FileSystemWriterAsync"](tmp_path)
    plan, planner = modules["save_state_dict_async_plan"], dcp.DefaultSavePlanner()
    planned = plan(state, writer, None, 0, planner=planner, enable_cache=True)
    save, preload, args = writer.get_save_function_and_args()
    finalize = modules["save_state_dict_async_finalize"]
    request = make_nvrx_async_request(
        modules["AsyncRequest"], save, args, [lambda: finalize(*planned)], async_fn_kwargs={}, preload_fn=preload
    )
    queue = modules["AsyncCallsQueue"]()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    modules["CachedMetadataFileSystemReader"].clear_metadata_cache()
    loaded = {"w": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("wanted", [("other", None), ("mcore", "Other")])
def test_a_strategy_or_a_name_that_nobody_knows_is_refused(wanted: tuple[str, str | None]) -> None:
    with pytest.raises(TypeError, match="found async_strategy .* expected 'mcore' or 'nvrx'"):
        get_async_strategy(*wanted)


def test_the_collector_rests_and_the_niceness_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    with _disable_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    raised: list[int] = []
    monkeypatch.setattr(os, "nice", lambda by: raised.append(by) or 4)
    for wanted in (10, 3, None):
        _set_process_qos(cpu_priority=wanted, io_priority=3)
    assert raised == [0, 6, 0, 0, 0, 0]


def half(at: int, values: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", values, (0, at, 2))


def test_classes_for_native_torch_show_their_shards_to_their_children() -> None:
    class Own(CheckpointableShardedTensor):
        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            return super().__get_tensor_shard__(index) + 1

    one, other = (half(at, torch.zeros(2, 3)) for at in (0, 1))
    own = Own.from_sh_ten(one)
    held = LocalShardsContainer([own, CheckpointableShardedTensor(other.data, other)])
    assert own._sh_ten is one and held._local_shards[0] is own and held._local_shards[1]._sh_ten is other
    assert type(LocalShardsContainer([one])._local_shards[0]) is CheckpointableShardedTensor
    found = [held.__get_tensor_shard__(MetadataIndex("w", place.global_offset)) for place in (one, other)]
    assert [part.mean().item() for part in found] == [1, 0]
    with pytest.raises(ValueError, match=r"looking up a shard of 'w': found offset torch.Size\(\[9, 0\]\)"):
        held.__get_tensor_shard__(MetadataIndex("w", (9, 0)))


def refused() -> dict[str, Callable[[], object]]:
    """Calls that are an AssertionError for some, and a CheckpointingException for others."""
    shard = ShardedTensor("w", None, torch.float32, (3,), (4,), (1,), None)
    held = MCoreTensorAwareStateDict.from_state_dict({"w": half(0, torch.zeros(2))}, algo="atomic")[0]
    hollow = MCoreTensorAwareStateDict.from_state_dict({"w": half(0, torch.zeros(2))}, algo="atomic")[0]
    hollow.pop_tensors()
    return {
        "no shards": lambda: LocalShardsContainer([]),
        "lengths": lambda: zip_strict([1], [1, 2]),
        "inserted twice": lambda: held.insert_tensors([torch.zeros(2)]),
        "made twice": held.init_tensors,
        "hollow state": lambda: hollow.to_state_dict({}),
        "hollow list": lambda: hollow.tensors,
        "hollow taken": hollow.pop_tensors,
        "hollow copied": hollow.copy_tensors_to_cpu,
        "no grid": shard.local_chunk_offset_in_global,
        "narrowed": lambda: shard.narrow(0, 0, 1),
        "name": lambda: ShardedObject.empty_from_unique_key("w"),
        "two shapes": lambda: validate_sharding_integrity([[half(0, torch.zeros(2)), half(1, torch.zeros(3))]]),
        "strategy": lambda: choose_save_strategy(object(), False),
    }


@pytest.mark.parametrize("name", refused())
def test_what_is_refused_is_an_error_of_either_kind(name: str) -> None:
    for kind in (AssertionError, CheckpointingException):
        with pytest.raises(kind):
            refused()[name]()


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
    got, strategy = torch.zeros(2, 3), TensorStoreLoadShardedStrategy()
    dist_checkpointing.load({"w": half(0, got)}, tmp_path, strategy, validate_access_integrity=False)
    assert got.eq(1).all()


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


def test_copies_that_do_not_block_are_there_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies from a device to locked memory then, and comes back before the values are there."""
    late: list[torch.Tensor] = []

    def copy_later(data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        late.append(torch.zeros_like(data))
        return late[-1]

    def arrive(devices: Any) -> None:
        assert devices
        for copy in late:
            copy.fill_(7.0)

    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), 7.0))}
    aware, _ = MCoreTensorAwareStateDict.from_state_dict(state, algo="atomic")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", copy_later)
        patch.setattr(tensor_aware_state_dict, "wait_for_devices", arrive)
        aware.copy_tensors_to_cpu(non_blocking=True)
    assert [one.tolist() for one in aware.pop_tensors()] == [[7.0, 7.0]]


def test_flat_dicts_and_walks() -> None:
    assert flatten_state_dict({"a": {"b": 1}, "c": [2]}) == ({"a.b": 1, "c.0": 2}, {"a.b": ("a", "b"), "c.0": ("c", 0)})
    with pytest.raises(ValueError, match="duplicated flatten key a.b"):
        flatten_state_dict({"a.b": 1, "a": {"b": 2}})
    values = {"x": 1, "y": 2}
    dict_map(lambda value: value + 1, values)
    dict_map_with_key(lambda key, value: f"{key}{value}", values)
    assert values == {"x": "x2", "y": "y3"}
    assert [(key, leaf) for _, key, leaf in nested_items_iter({"a": [1], "b": 2})] == [(0, 1), ("b", 2)]


def test_native_torch_pads_and_cuts_what_may_differ_in_shape(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0).reshape(3, 2))}, tmp_path)
    for rows in (2, 5):
        got = torch.full((rows, 2), 9.0)
        wanted = ShardedTensor.from_rank_offsets("w", got, allow_shape_mismatch=True)
        planner = MCoreLoadPlanner(allow_shape_mismatch_sharded_tensors={"w": wanted})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(mcore_to_pyt_state_dict({"w": [wanted]}), checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert got.flatten().tolist() == [*range(6), 0, 0, 0, 0][: 2 * rows]
    other = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2))
    strict = MCoreLoadPlanner(shapes_validation_sharded_tensors=[other])
    with warnings.catch_warnings(), pytest.raises(BaseException, match="Global shape mismatch"):
        warnings.simplefilter("ignore")
        dcp.load(mcore_to_pyt_state_dict({"w": [other]}), checkpoint_id=tmp_path, planner=strict, no_dist=True)
    with pytest.raises(CheckpointingException, match=r"save them with dist_checkpointing\.save"):
        MCoreSavePlanner(nd_flattened_global_shapes={"w": (2, 3)})


def test_entities_are_put_under_their_keys_and_back() -> None:
    nest: Any = {
        "a": [half(0, torch.zeros(2, 3)), {3: half(1, torch.ones(2, 3))}],
        "o": ShardedObject("o", 7, (1,), (0,)),
    }
    by_key, paths, names = _replace_state_dict_keys_with_sharded_keys(nest)
    assert {key: len(values) for key, values in by_key.items()} == {"w": 2, "o/shard_0_1": 1}
    native = mcore_to_pyt_state_dict(by_key)
    values = {key: _unwrap_pyt_sharded_tensor(value) for key, value in native.items()}
    back = _replace_sharded_keys_with_state_dict_keys(values, paths, names)
    _restore_dict_types(back, nest)
    assert (back["o"], back["a"][0].sum(), back["a"][1][3].sum()) == (7, 0, 6)
    as_text: Any = {"a": {"5": 1, "b": 2}}
    _restore_dict_types(as_text, {"a": {5: None, "b": None}})
    assert as_text == {"a": {"b": 2, 5: 1}}


def test_tensors_under_a_hint_have_a_file_of_their_own(tmp_path: Path) -> None:
    names = ["optimizer.a", "model.b", "optimizer.c"]
    state: Any = {
        name: ShardedTensor.from_rank_offsets(name, torch.full((3,), float(at))) for at, name in enumerate(names)
    }
    state["rng"] = ShardedObject("rng", 5, (1,), (0,))
    strategy = TorchDistSaveShardedStrategy(separation_hint="optimizer")
    dist_checkpointing.save(state, tmp_path, strategy, verify_integrity=True)
    assert {path.name for path in tmp_path.glob("*.distcp")} == {"__0_0.distcp", "optimizer__0_0.distcp"}
    plain = dist_checkpointing.load_plain_tensors(tmp_path)
    assert [plain[name].tolist() for name in names] == [[at] * 3 for at in range(3)]
    verify_integrity_manifest(tmp_path)
    dist_checkpointing.remove_sharded_tensors(tmp_path, "optimizer")
    assert {path.name for path in tmp_path.glob("*.distcp")} == {"__0_0.distcp"}
    assert dist_checkpointing.load_plain_tensors(tmp_path)["model.b"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointingException, match="beginning of a file name"):
        TorchDistSaveShardedStrategy(separation_hint="../up")


def test_a_plan_of_native_torch_is_written_apart_and_finished(tmp_path: Path) -> None:
    weight = torch.arange(8.0)
    state: Any = {"model": {"w": weight, "v": torch.ones(2, 2)}, "step": 3}
    writer = FileSystemWriterAsync(tmp_path)
    planned, *_ = save_state_dict_async_plan(state, writer)
    weight.zero_()  # what was copied is what is written
    function, preload, args = writer.get_save_function_and_args()
    request = AsyncRequest(function, tuple(args), [lambda: save_state_dict_async_finalize(*planned)], {}, preload)
    request.execute_sync()
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    got: Any = {"model": {"w": torch.zeros(8), "v": torch.zeros(2, 2)}, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
    assert (got["model"]["w"].tolist(), got["step"]) == (list(range(8)), 3)


def test_a_writer_that_has_not_written_finishes_nothing(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path)
    planned, *_ = save_state_dict_async_plan({"w": torch.ones(2)}, writer)
    writer.get_save_function_and_args()
    with pytest.raises(CheckpointingException, match="has returned nothing"):
        save_state_dict_async_finalize(*planned)
    assert not (tmp_path / ".metadata").exists()
    for refused in ({"use_msc": True}, {"separation_hint": "model"}):
        with pytest.raises(NotImplementedError, match="expected one file per rank"):
            FileSystemWriterAsync(tmp_path, **refused)


def test_a_checkpoint_of_a_gpt_is_refused_for_another_model_by_name() -> None:
    with pytest.raises(ValueError, match="'M\\*-'.*layers are not renamed here.*megatron.core") as raised:
        gpt_compatible_layer_maps("M*-")
    assert isinstance(raised.value, CheckpointingException)
