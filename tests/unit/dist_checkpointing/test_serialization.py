"""Save and load in one process: what comes back, where it stands, and who else can read it."""

from __future__ import annotations

import json
import logging
import pickle
from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from remesh import dist_checkpointing
from remesh.dist_checkpointing import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    validation,
)
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.dict_utils import dict_list_map_outplace
from remesh.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from remesh.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from remesh.dist_checkpointing.strategies.common import load_common, save_common
from remesh.foundation.errors import FormatError

DTYPES = [
    *[torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool],
    *[torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64],
    *[torch.float8_e4m3fn, torch.float8_e5m2],
]


def whole(key: str, data: torch.Tensor, **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **fields)


def load(request: dict[str, Any], path: Path, **options: Any) -> dict[str, Any]:
    loaded = dist_checkpointing.load(request, path, **options)
    assert isinstance(loaded, dict)
    return loaded


def test_the_key_is_the_identity_and_the_dict_only_the_form(tmp_path: Path) -> None:
    dist_checkpointing.save({"ignored": whole("tensor-A", torch.ones(3))}, tmp_path)
    assert load({"different-key": whole("tensor-A", torch.zeros(3))}, tmp_path)["different-key"].tolist() == [1, 1, 1]


def test_tensors_are_filled_in_place_and_cast(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": whole("w", torch.arange(6))}, tmp_path)
    mine = torch.nn.Parameter(torch.zeros(6))
    loaded = load({"w": whole("w", mine)}, tmp_path)["w"]
    assert loaded.data_ptr() == mine.data_ptr()
    assert loaded.dtype == torch.float32
    assert not loaded.requires_grad
    assert mine.tolist() == [0, 1, 2, 3, 4, 5]


def test_descriptions_without_data_get_new_tensors(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": whole("w", torch.arange(6))}, tmp_path)
    asked = whole("w", torch.zeros(6, dtype=torch.int16)).without_data()
    loaded = load({"w": asked}, tmp_path)["w"]
    assert (loaded.dtype, loaded.tolist()) == (torch.int16, [0, 1, 2, 3, 4, 5])
    assert asked.data is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    num_bytes = 6 * dtype.itemsize
    bits = torch.tensor([n % (2 if dtype is torch.bool else 251) for n in range(num_bytes)], dtype=torch.uint8)
    data = bits.view(dtype).reshape(2, 3)
    dist_checkpointing.save({"w": whole("w", data)}, tmp_path)
    loaded = load({"w": whole("w", torch.zeros(2, 3).to(dtype))}, tmp_path)["w"]
    assert torch.equal(loaded.view(torch.uint8), data.view(torch.uint8))


def test_tensors_of_any_strides_go_both_ways(tmp_path: Path) -> None:
    source = torch.arange(24.0).reshape(4, 6)
    dist_checkpointing.save({"t": whole("t", source.t()), "s": whole("s", source[::2, 1::2])}, tmp_path)
    target = torch.zeros(12, 4)
    load({"t": whole("t", target[::2]), "s": whole("s", torch.zeros(3, 2).t())}, tmp_path)
    assert torch.equal(target[::2], source.t())
    assert not target[1::2].any()
    small = load({"s": whole("s", torch.zeros(3, 2).t())}, tmp_path)["s"]
    assert torch.equal(small, source[::2, 1::2])


def test_only_the_elements_are_written_of_a_view(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": whole("w", torch.zeros(1_000_000)[:10])}, tmp_path)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 5000


def test_scalars_and_empty_tensors_round_trip(tmp_path: Path) -> None:
    dist_checkpointing.save({"s": whole("s", torch.tensor(3.5)), "e": whole("e", torch.zeros(0, 4))}, tmp_path)
    loaded = load({"s": whole("s", torch.tensor(0.0)), "e": whole("e", torch.zeros(0, 4))}, tmp_path)
    assert loaded["s"].item() == 3.5
    assert loaded["e"].shape == (0, 4)


def test_prepended_axes_are_stored_and_stripped(tmp_path: Path) -> None:
    layers = [
        ShardedTensor.from_rank_offsets("layers", torch.full((2, 3), float(at)), (0, at, 4), prepend_axis_num=1)
        for at in range(4)
    ]
    dist_checkpointing.save({"layers": layers}, tmp_path)
    assert dist_checkpointing.load_plain_tensors(tmp_path)["layers"][:, 1, 2].tolist() == [0, 1, 2, 3]
    target = torch.zeros(3, 2).t()
    loaded = load(
        {"w": ShardedTensor.from_rank_offsets("layers", target, (0, 2, 4), prepend_axis_num=1)},
        tmp_path,
        validate_access_integrity=False,
    )["w"]
    assert loaded.eq(2).all()
    assert target.eq(2).all()


def test_common_data_is_written_once_and_comes_back_even_unasked(tmp_path: Path) -> None:
    common = {"step": 7, 3: "int key", "lr": [0.1, {"x": None}], "empty": {}, "array": np.arange(3), "t": torch.ones(2)}
    dist_checkpointing.save({**common, "w": whole("w", torch.ones(1))}, tmp_path, content_metadata={"form": "dp"})
    loaded = load({"w": whole("w", torch.zeros(1)), "step": 0}, tmp_path)
    assert loaded.pop("array").tolist() == [0, 1, 2]
    assert loaded.pop("t").tolist() == [1, 1]
    assert loaded.pop("w").item() == 1
    assert loaded.pop("content_metadata") == {"form": "dp"}
    assert loaded == {"step": 7, 3: "int key", "lr": [0.1, {"x": None}], "empty": {}}
    assert dist_checkpointing.load_common_state_dict(str(tmp_path))["step"] == 7
    assert dist_checkpointing.load_content_metadata(tmp_path) == {"form": "dp"}
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict={}) is None


def test_objects_come_back_by_element(tmp_path: Path) -> None:
    objects = [ShardedObject("rng", {"seed": at}, (2, 2), (at // 2, at % 2)) for at in range(4)]
    dist_checkpointing.save({"o": objects}, tmp_path)
    asked = {"o": [ShardedObject("rng", None, (2, 2), (1, at)) for at in (1, 0)]}
    assert load(asked, tmp_path, validate_access_integrity=False)["o"] == [{"seed": 3}, {"seed": 2}]
    assert set(dist_checkpointing.load_sharded_metadata(tmp_path)) == {one.unique_key for one in objects}


def test_nonpersistent_objects_stay_out_of_the_file_and_in_the_result(tmp_path: Path) -> None:
    handle = object()
    dist_checkpointing.save({"h": LocalNonpersistentObject(lambda: 0), "a": 1}, tmp_path)
    assert load({"h": LocalNonpersistentObject(handle)}, tmp_path) == {"h": handle, "a": 1}


def swiglu(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
    """[W; V] of rank 1 of 2: W at piece 1, V at piece 3 of 4."""
    return [
        ShardedTensor.from_rank_offsets(key, half, (0, 2 * at + 1, 4), replica_id=replica_id)
        for at, half in enumerate(data.chunk(2))
    ]


def test_factories_are_built_merged_and_leave_the_dict_alone(tmp_path: Path) -> None:
    def factory(data: torch.Tensor) -> ShardedTensorFactory:
        return ShardedTensorFactory("gate_up", data, swiglu, torch.cat)

    state = {"mlp": [factory(torch.arange(8.0)), 5]}
    dist_checkpointing.save(state, tmp_path, validate_access_integrity=False)
    assert isinstance(state["mlp"][0], ShardedTensorFactory), "the caller's dict is not changed"
    loaded = load({"mlp": [factory(torch.zeros(8)), 0]}, tmp_path, validate_access_integrity=False)
    assert loaded["mlp"][0].tolist() == list(range(8))
    assert loaded["mlp"][1] == 5


def test_allowed_shape_mismatch_pads_with_zeros_and_cuts(tmp_path: Path) -> None:
    dist_checkpointing.save({"e": whole("e", torch.arange(16.0).reshape(8, 2))}, tmp_path)

    def ask(rows: int, at: int, num_parts: int) -> torch.Tensor:
        data = torch.full((rows, 2), -1.0)
        piece = ShardedTensor.from_rank_offsets("e", data, (0, at, num_parts), allow_shape_mismatch=True)
        result: torch.Tensor = load({"e": piece}, tmp_path, validate_access_integrity=False)["e"]
        return result

    assert ask(6, 1, 2).tolist() == [[12, 13], [14, 15], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert ask(3, 1, 2).tolist() == [[6, 7], [8, 9], [10, 11]]
    assert not ask(9, 1, 2).any()


def test_strict_modes_do_what_they_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dist_checkpointing.save({"a": whole("a", torch.ones(2)), "b": whole("b", torch.ones(2)), "step": 1}, tmp_path)

    def ask() -> dict[str, Any]:
        return {"a": whole("a", torch.zeros(2)), "l": [whole("new", torch.zeros(2))]}

    with pytest.raises(CheckpointingException, match="'new'"):
        load(ask(), tmp_path)
    with pytest.raises(CheckpointingException, match="Unexpected keys"):
        load(ask(), tmp_path, strict="raise_unexpected")
    with pytest.raises(CheckpointingException, match="Missing keys"):
        load(ask(), tmp_path, strict="raise_all")
    state, missing, unexpected = dist_checkpointing.load(ask(), tmp_path, strict="return_all")  # type: ignore[misc]
    assert (missing, unexpected) == ({"b"}, {"new"})
    assert state["a"].eq(1).all()  # type: ignore[call-overload]
    assert state["l"] == []  # type: ignore[call-overload]
    assert dist_checkpointing.load(ask(), tmp_path, strict="return_unexpected")[1:] == (set(), {"new"})  # type: ignore[index]
    assert load(ask(), tmp_path, strict="ignore_all")["step"] == 1
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load(ask(), tmp_path, strict="log_all")
    assert "Missing keys (for all ranks): {'b'}" in caplog.text
    with pytest.raises(ValueError, match="Invalid strict flag"):
        load(ask(), tmp_path, strict="maybe")


def test_a_load_that_fails_changes_no_tensor(tmp_path: Path) -> None:
    dist_checkpointing.save({"a": whole("a", torch.ones(2))}, tmp_path)
    mine = torch.zeros(2)
    with pytest.raises(CheckpointingException):
        load({"a": whole("a", mine), "b": whole("b", torch.zeros(1))}, tmp_path)
    assert not mine.any()


def test_whole_tensors_need_no_description(tmp_path: Path) -> None:
    dist_checkpointing.save(
        {"w": [ShardedTensor.from_rank_offsets("w", torch.full((2,), at), (0, at, 3)) for at in range(3)], "n": 1},
        tmp_path,
    )
    described = dist_checkpointing.load_tensors_metadata(tmp_path)["w"]
    assert (described.global_shape, described.data, described.global_offset) == ((6,), None, (0,))
    loaded = dist_checkpointing.load_plain_tensors(tmp_path)
    assert loaded["w"].tolist() == [0, 0, 1, 1, 2, 2]
    assert set(loaded) == {"w"}, "tensors only"


def test_both_call_styles_of_the_fourth_place_are_understood(tmp_path: Path) -> None:
    half = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))}
    with pytest.raises(CheckpointingException, match="Invalid sharding pattern"):
        dist_checkpointing.save(half, tmp_path, None, None, True)
    dist_checkpointing.save(half, tmp_path, ("torch_dist", 1), False)
    load(half, tmp_path, sharded_strategy=None, common_strategy=None, validate_access_integrity=False)
    with pytest.raises(CheckpointingException, match="Cannot find a default strategy for: .*tensors"):
        dist_checkpointing.load(half, tmp_path, ("tensors", 1))
    with pytest.raises(CheckpointingException, match="common_strategy='torch'"):
        dist_checkpointing.load(half, tmp_path, None, "torch")  # type: ignore[arg-type]


class Foreign:
    """A class that no reader would know."""


@pytest.mark.parametrize("value", [Foreign(), lambda: 0, Fraction(1, 2)])
def test_what_could_not_be_read_back_is_refused_at_once(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointingException, match="serialising the common data"):
        dist_checkpointing.save({"a": {"b": value}}, tmp_path)
    with pytest.raises(CheckpointingException, match="serialising object 'o/shard_0_1'"):
        dist_checkpointing.save({"o": ShardedObject("o", value, (1,), (0,))}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_classes_that_the_program_allows_are_kept(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Foreign]):
        dist_checkpointing.save({"a": Foreign()}, tmp_path)
        assert isinstance(load({}, tmp_path)["a"], Foreign)
    with pytest.raises(FormatError, match="add_safe_globals"):
        load({}, tmp_path)


def test_arguments_of_a_program_are_common_data_and_run_nothing(tmp_path: Path) -> None:
    arguments = Namespace(lr=0.5, layers=[1, 2], inner=SimpleNamespace(dtype=torch.bfloat16))
    (tmp_path / "other").mkdir()
    (tmp_path / "good").mkdir()
    dist_checkpointing.save({"args": arguments}, tmp_path / "good")
    assert dist_checkpointing.load_common_state_dict(tmp_path / "good") == {"args": arguments}
    with pytest.raises(CheckpointingException, match="could not be loaded again"):
        dist_checkpointing.save({"args": Namespace(hook=Foreign())}, tmp_path / "other")


def test_an_entity_in_a_tuple_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=r"the tuple at a\.0 holds a sharded entity"):
        dist_checkpointing.save({"a": [(1, (whole("w", torch.ones(1)),))]}, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_native_torch_reads_what_we_write(tmp_path: Path) -> None:
    data = torch.arange(24.0).reshape(4, 6)
    parts = [
        ShardedTensor.from_rank_offsets("w", data[2 * i : 2 * i + 2, 3 * j : 3 * j + 3], (0, i, 2), (1, j, 2))
        for i in range(2)
        for j in range(2)
    ]
    dist_checkpointing.save({"w": parts, "o": ShardedObject("o", [1], (1,), (0,)), "step": 1}, tmp_path)
    state = {"w": torch.zeros(4, 6)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["w"], data)


def test_the_files_are_those_of_the_format(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": whole("w", torch.ones(2)), "o": ShardedObject("o", 5, (1,), (0,)), "n": 1}, tmp_path)
    names = {"__0_0.distcp", ".metadata", ".remesh-index", "common.pt", "metadata.json", ".remesh-checksums"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert type(metadata) is dcp.Metadata
    assert set(vars(metadata)) == {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    (object_info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "o/shard_0_1"]
    (tensor_info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "w"]
    assert object_info.offset == 0, "objects come first in a file"
    assert tensor_info.offset == object_info.length
    blob = (tmp_path / "__0_0.distcp").read_bytes()[: object_info.length]
    (tmp_path / "blob").write_bytes(blob)
    assert torch.load(tmp_path / "blob", weights_only=True) == [5]
    assert torch.load(tmp_path / "common.pt", weights_only=True) == {"n": 1}


def test_equal_states_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        dist_checkpointing.save({"w": whole("w", torch.ones(2)), "n": {"x": 1}}, tmp_path / name)
    for name in ("__0_0.distcp", "common.pt", "metadata.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_common_data_stored_as_an_object_is_found(tmp_path: Path) -> None:
    # The layout of writers from 0.19 on: no common.pt, two fields in the marker.
    common = ShardedObject("common_state", {"step": 9}, (1,), (0,))
    dist_checkpointing.save({"w": whole("w", torch.ones(2)), "c": common}, tmp_path)
    (tmp_path / "common.pt").unlink()
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    loaded = dist_checkpointing.load({"w": whole("w", torch.zeros(2))}, tmp_path, strict="raise_all")
    assert loaded["step"] == 9  # type: ignore[call-overload]
    assert dist_checkpointing.load_common_state_dict(tmp_path) == {"step": 9}


def test_common_functions_stand_alone(tmp_path: Path) -> None:
    save_common({"a": 1}, tmp_path)
    assert load_common(tmp_path) == {"a": 1}
    torch.save([1], tmp_path / "common.pt")
    with pytest.raises(FormatError, match="holds a list"):
        load_common(tmp_path)


def test_tensors_are_removed_by_prefix_and_files_that_nothing_needs_go(tmp_path: Path) -> None:
    state = {
        "m": whole("model.w", torch.ones(4)),
        "o": [whole("optim.a", torch.ones(4)), whole("optim.b", torch.ones(2))],
        "flat": ShardedTensor.from_rank_offsets_flat("optim.f", torch.ones(4), (4,), flattened_range=slice(0, 4)),
    }
    dist_checkpointing.save(state, tmp_path, verify_integrity=True)
    dist_checkpointing.remove_sharded_tensors(tmp_path, "nothing")
    dist_checkpointing.remove_sharded_tensors(str(tmp_path), "optim.")
    assert set(dist_checkpointing.load_tensors_metadata(tmp_path)) == {"model.w"}
    found = load({"m": whole("model.w", torch.zeros(4))}, tmp_path, strict="raise_all", verify_integrity=True)["m"]
    assert found.eq(1).all()
    dist_checkpointing.remove_sharded_tensors(tmp_path, "model")
    assert not list(tmp_path.glob("*.distcp"))
    assert load({}, tmp_path, verify_integrity=True) == {}


def test_sums_of_all_files_are_an_option(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": whole("w", torch.ones(4)), "n": 1}, tmp_path)
    with pytest.raises(FormatError, match="integrity.json"):
        load({}, tmp_path, verify_integrity=True)
    validation.save_integrity_manifest(tmp_path)
    assert load({}, tmp_path, verify_integrity=True) == {"n": 1}
    (tmp_path / validation.INTEGRITY_FNAME).write_text((tmp_path / "integrity.json").read_text().replace("a", "b"))
    with pytest.raises(FormatError, match="SHA-256"):
        validation.verify_integrity_manifest(tmp_path)


def test_strategies_of_a_program_are_called_with_the_sharded_part(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Save(SaveShardedStrategy):
        can_handle_sharded_objects = True  # type: ignore[assignment]

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            seen.update(sharded_state_dict)
            return "a value that nobody asks for"

    class Load(LoadShardedStrategy):
        def check_backend_compatibility(self, loaded_backend: str) -> None:
            assert loaded_backend == "memory"

        def check_version_compatibility(self, loaded_version: int) -> None:
            assert loaded_version == 3

        def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, ShardedTensor]:
            return {"w": seen["l"][1].without_data()}

        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            return dict_list_map_outplace(lambda asked: asked.data.copy_(seen["l"][1].data), sharded_state_dict)

    register_default_strategy(StrategyAction.SAVE_SHARDED, "memory", 3, Save("memory", 3))
    register_default_strategy(StrategyAction.LOAD_SHARDED, "memory", 3, Load())
    dist_checkpointing.save({"l": ["common", whole("w", torch.ones(2))]}, tmp_path, ("memory", 3))
    request = {"l": ["", whole("w", torch.zeros(2))], "x": whole("unexpected", torch.zeros(1))}
    loaded = load(request, tmp_path, strict="log_unexpected")
    assert loaded["l"][0] == "common"
    assert loaded["l"][1].tolist() == [1, 1]
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointingException, match="Cannot apply async_save"):
        dist_checkpointing.save({}, tmp_path / "b", ("memory", 3), async_sharded_save=True)
    assert isinstance(get_default_load_sharded_strategy(tmp_path), Load)


def _factory(key: str, *names: str) -> ShardedTensorFactory:
    """Builds one tensor of that key, or one for each name."""

    def build(key: str, data: torch.Tensor, *_: Any) -> Any:
        return {name: whole(f"{key}.{name}", data.clone()) for name in names} if names else whole(key, data)

    return ShardedTensorFactory(key, torch.zeros(2), build, lambda loaded: ("merged", loaded))


def test_factories_of_which_nothing_is_stored_are_left_out_and_others_keep_their_places(tmp_path: Path) -> None:
    dist_checkpointing.save({"l": [whole("a", torch.ones(2)), _factory("f", "x", "y"), _factory("one")]}, tmp_path)
    request = {
        "l": [
            whole("new", torch.zeros(2)),
            _factory("gone", "x"),
            _factory("f", "x", "y"),
            _factory("lost"),
            _factory("one"),
        ]
    }
    found: Any = load(request, tmp_path, strict="log_all")
    assert [kind for kind, _ in found["l"]] == ["merged", "merged"]
    assert sorted(found["l"][0][1]) == ["x", "y"]
    assert found["l"][1][1].tolist() == [0, 0]


def test_a_factory_of_which_a_part_is_stored_is_told_by_its_key_and_place(tmp_path: Path) -> None:
    dist_checkpointing.save({"m": {"f": _factory("f", "x")}}, tmp_path)
    with pytest.raises(CheckpointingException, match=r"factory 'f' at m\.f .* 1 of 2 entities, not \['f\.y'\]"):
        load({"m": {"f": _factory("f", "x", "y")}}, tmp_path, strict="ignore_all")


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_what_a_strategy_by_itself_has_saved_one_by_itself_loads(tmp_path: Path, backend: str) -> None:
    """Without save and load around it, so without a marker; and a later save of the same strategy, too."""
    saving = get_default_save_sharded_strategy(backend, 1)
    loading = get_default_strategy(StrategyAction.LOAD_SHARDED, backend, 1)
    for value in (1.0, 2.0):
        place = tmp_path / str(value)
        place.mkdir()
        saving.save({"w": one_box(value), "o": ShardedObject("o", {"a": value}, (1,), (0,))}, place)
        loaded = loading.load({"w": one_box(0.0), "o": ShardedObject("o", None, (1,), (0,))}, place)
        assert loaded["w"].eq(value).all() and loaded["o"] == {"a": value}
        with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
            dist_checkpointing.load({"w": one_box(0.0)}, place)


def one_box(value: float) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.full((3, 2), value))
