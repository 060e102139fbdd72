"""Small functions that programs import by name, and both ends of a save and a load."""

from __future__ import annotations

import logging

import pytest
import torch

from remesh.dist_checkpointing import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    utils,
)
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess


def tensor(key: str, **fields: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(4), **fields)


def flat(start: int, stop: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets_flat(
        "f", torch.zeros(stop - start), (2, 3), flattened_range=slice(start, stop)
    )


def test_parts_by_kind() -> None:
    one, element, factory = tensor("t"), ShardedObject("o", 1, (1,), (0,)), ShardedTensorFactory("f", None, list, list)
    local = LocalNonpersistentObject(3)
    state = {"t": one, "o": [element], "f": factory, "n": local, "c": 1}
    assert utils.extract_sharded_tensors(state) == ({"t": one}, {"o": [element], "f": factory, "n": local, "c": 1})
    assert utils.extract_sharded_tensors_and_factories(state)[0] == {"t": one, "f": factory}
    assert utils.extract_sharded_tensors_or_nonpersistent(state)[0] == {"t": one, "f": factory, "n": local}
    assert utils.extract_sharded_base(state)[1] == {"n": local, "c": 1}
    assert utils.extract_nonpersistent(state)[0] == {"n": local}
    assert utils._sharded_tensor_shard_id(flat(1, 3)) == ("f", (0, 0), (1, 3))
    assert utils._sharded_object_id(element) == ("o", (0,), (1,))
    with pytest.raises(ValueError):
        list(utils.zip_strict([1], [1, 2]))


def test_prefixes_of_keys_change_in_place() -> None:
    state = {"a": tensor("a.w"), "b": [ShardedObject("b", 1, (1,), (0,))], "c": "a.w"}
    utils.add_prefix_for_sharding(state, "m.")
    assert (state["a"].key, state["b"][0].key, state["c"]) == ("m.a.w", "m.b", "a.w")  # type: ignore[index, union-attr]
    utils.replace_prefix_for_sharding(state, "m.", "n.")
    utils.apply_prefix_mapping(state, {"n.a": "x", "n": "y"})
    assert (state["a"].key, state["b"][0].key) == ("x.w", "y.b")  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="Expected y.b to begin with prefix x"):
        utils.replace_prefix_for_sharding(state, "x", "z")


def test_times_are_logged_under_the_name_of_the_block(caplog: pytest.LogCaptureFixture) -> None:
    base = logging.getLogger("test.times")
    with (
        caplog.at_level(logging.DEBUG),
        utils.debug_time("outer", base),
        utils.debug_time("inner", base, threshold=1e9),
    ):
        pass
    assert [record.name for record in caplog.records] == ["test.times.outer"]
    assert utils._clean_metadata_for_serialization({"a": 1, "dp_cp_group": object()}) == {"a": 1}


def test_both_ends_of_a_save_and_a_load() -> None:
    def build(key: str, data: object, replica_id: object, flattened_range: object) -> dict[str, ShardedTensor]:
        return {"x": tensor(key)}

    state = {
        "f": ShardedTensorFactory("built", torch.zeros(4), build, lambda sub: sub["x"]),
        "empty": flat(0, 0),
        "rest": flat(0, 6),
        "n": LocalNonpersistentObject(5),
        "step": 1,
    }
    request, nonpersistent, factories = load_preprocess(state)
    assert nonpersistent == {"n": 5}
    assert request["f"]["x"].key == "built"
    assert factories["f"].data is None
    assert isinstance(state["f"], ShardedTensorFactory), "a load leaves the caller's dict alone"
    sharded, common = save_preprocess(state)
    assert (set(sharded), common) == ({"f", "rest"}, {"step": 1})
    with pytest.raises(CheckpointingException, match="Invalid sharding pattern"):
        save_preprocess({"half": flat(0, 3)})
