"""Entities check what they are told, and say where their data sits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from remesh.checkpoint.values.outline import Outline, outline_of
from remesh.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.mapping import apply_factories, apply_factory_merges, is_main_replica
from remesh.foundation.errors import Error
from remesh.layout import Box


def shard(**changes: object) -> ShardedTensor:
    """A quarter of a [8, 6] tensor, with some fields told otherwise."""
    fields: dict[str, object] = {
        "key": "w",
        "data": torch.zeros(4, 3),
        "dtype": torch.float32,
        "local_shape": (4, 3),
        "global_shape": (8, 6),
        "global_offset": (4, 0),
        "axis_fragmentations": (2, 2),
    }
    return ShardedTensor(**{**fields, **changes})  # type: ignore[arg-type]


def test_rank_offsets_describe_a_cell_of_the_grid() -> None:
    piece = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), (0, 1, 2), (1, 0, 5), replica_id=(0, 2))
    assert (piece.global_shape, piece.global_offset, piece.axis_fragmentations) == ((8, 15), (4, 0), (2, 5))
    assert piece.global_box() == Box((4, 0), (8, 3))
    assert piece.local_chunk_offset_in_global() == (1, 0)
    assert not is_main_replica(piece.replica_id)


def test_a_prepended_axis_has_one_index_of_its_own() -> None:
    data = torch.arange(6).reshape(2, 3)
    piece = ShardedTensor.from_rank_offsets("layers", data, (0, 3, 4), (1, 1, 2), prepend_axis_num=1)
    assert (piece.global_shape, piece.global_offset) == ((4, 4, 3), (3, 2, 0))
    assert piece.data_in_box().shape == (1, 2, 3)
    piece.data_in_box().zero_()
    assert not data.any(), "the box is a view of the data"


@pytest.mark.parametrize("offsets", [(-1, 0, 1), (2, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_rank_offsets_outside_the_grid_are_refused(offsets: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointingException, match="Invalid rank offsets"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), offsets)


def test_rank_offsets_take_no_flattened_range() -> None:
    with pytest.raises(ValueError, match="flattened_range"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(4), flattened_range=slice(0, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": torch.int32}, "dtype torch.float32, expected torch.int32"),
        ({"local_shape": (4, 2)}, "shape (4, 3), expected local_shape (4, 2)"),
        ({"global_shape": (8,)}, "must have 2 axes"),
        ({"global_offset": (4, 0, 0)}, "must have 2 axes"),
        ({"axis_fragmentations": (2,)}, "one number for each axis"),
        ({"global_offset": (3, 0)}, "offset 3 is no multiple of the local size 4"),
        ({"flattened_range": slice(0, 3)}, "expected the length of flattened_range"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointingException) as caught:
        shard(**changes)
    assert said in str(caught.value)
    assert "'w'" in str(caught.value)
    assert isinstance(caught.value, Error)


def test_an_uneven_box_may_lie_anywhere() -> None:
    piece = shard(axis_fragmentations=None, global_offset=(3, 1))
    assert not piece.has_regular_grid
    with pytest.raises(CheckpointingException, match="no regular grid"):
        piece.local_chunk_offset_in_global()


def test_repr_leaves_the_data_out() -> None:
    assert "tensor(" not in repr(shard())


def test_narrowing_keeps_the_grid_and_shares_the_data() -> None:
    whole = shard()
    (part,) = whole.narrow(0, 1, 2)
    assert (part.local_shape, part.global_shape, part.global_offset) == ((2, 3), (4, 6), (2, 0))
    assert part.data is not None and whole.data is not None
    part.data.fill_(7.0)
    assert whole.data[1:3].eq(7.0).all()


def test_init_data_makes_data_once() -> None:
    described = shard().without_data()
    described.init_data("cpu", torch.ones)
    first = described.data
    described.init_data("cpu", torch.zeros)
    assert described.data is first
    assert first is not None and first.eq(1).all()


def test_object_names_round_trip_even_with_slashes() -> None:
    element = ShardedObject("rng/state", [1], (2, 3), (1, 0))
    assert element.unique_key == "rng/state/shard_1.0_2.3"
    again = ShardedObject.empty_from_unique_key(element.unique_key)
    assert (again.key, again.global_offset, again.global_shape) == ("rng/state", (1, 0), (2, 3))
    assert ShardedObject.empty_from_unique_key("a/shard_1.0_2").global_shape == (2, -1)
    assert str(element) == "ShardedObject(key='rng/state')"
    for name in ("rng", "rng/shard_", "rng/shard_a_b", "rng/shard_1_2_3"):
        with pytest.raises(CheckpointingException, match="reading object name"):
            ShardedObject.empty_from_unique_key(name)


def test_outlines_carry_everything_but_the_data_and_which_replica_it_is() -> None:
    entities = [
        shard(replica_id=(0, 1)),
        shard(axis_fragmentations=None, allow_shape_mismatch=True),
        ShardedTensor.from_rank_offsets("l", torch.zeros(2, dtype=torch.bfloat16), (0, 1, 3), prepend_axis_num=1),
        ShardedObject("o", object(), (3,), (1,), replica_id=2),
    ]
    bare = [replace(one.without_data(), replica_id=1 - is_main_replica(one.replica_id)) for one in entities]
    assert Outline.from_parts(json.loads(json.dumps(outline_of(entities).parts()))).entities() == bare


def halves(key: str, data: torch.Tensor, replica_id: object, flattened_range: object) -> list[ShardedTensor]:
    size = len(data) // 2
    return [ShardedTensor.from_rank_offsets(key, half, (0, at, 2)) for at, half in enumerate(data.split(size))]


def test_factories_are_built_in_place_and_merged_back() -> None:
    factory = ShardedTensorFactory("gate_up", torch.arange(6), halves, torch.cat)  # type: ignore[arg-type]
    state = {"a": [factory, 1], "b": {"c": factory}}
    apply_factories(state)
    assert [piece.global_offset for piece in state["a"][0]] == [(0,), (3,)]  # type: ignore[index, union-attr]
    loaded = {"a": [[torch.tensor([1]), torch.tensor([2])], 1], "b": {"c": [torch.tensor([3])]}}
    merged = apply_factory_merges(loaded, {"a": {0: factory}, "b": {"c": factory}})
    assert merged["a"][0].tolist() == [1, 2]
    assert merged["b"]["c"].tolist() == [3]


@pytest.mark.parametrize(
    ("loaded", "factories", "said"),
    [
        ({"a": 1}, {"b": {}}, "Different dict keys encountered in `apply_factory_merges`"),
        ([1], [{}, {}], "Cannot merge two lists with different lengths"),
        ([1], {"x": {}}, "Invalid dict key x non-integer type encountered"),
        ([1], {4: {}}, "Dict key 4 out of bound for list of length"),
        (1, {}, "Duplicate non-dict and non-list values encountered"),
    ],
)
def test_merges_of_another_form_are_refused(loaded: object, factories: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        apply_factory_merges(loaded, factories)


def test_nonpersistent_objects_unwrap() -> None:
    assert LocalNonpersistentObject({"a": 1}).unwrap() == {"a": 1}
