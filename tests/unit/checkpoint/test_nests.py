"""Nests come apart and together again without losing anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from remesh.checkpoint.values.nests import (
    LEFT_OUT,
    copy_nest,
    dict_list_map_inplace,
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    graft,
    map_reduce,
    merge,
    nested_leaves,
    nested_values,
)
from remesh.dist_checkpointing.core import CheckpointingException


class Entity:
    """Stands for anything sharded."""


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    inner = st.recursive(
        leaves,
        lambda nest: (
            st.lists(nest, max_size=4) | st.dictionaries(st.integers() | st.text(max_size=2), nest, max_size=4)
        ),
        max_leaves=12,
    )
    return st.dictionaries(st.text(max_size=2), inner, max_size=4)


mixed = nests(st.integers() | st.none() | st.builds(Entity))
entities_only = nests(st.builds(Entity))


def is_entity(leaf: object) -> bool:
    return isinstance(leaf, Entity)


@given(mixed)
def test_extraction_splits_the_leaves_in_two(nest: dict[str, Any]) -> None:
    match, rest = extract_matching_values(nest, is_entity)
    assert list(nested_values(match)) == [leaf for leaf in nested_values(nest) if is_entity(leaf)]
    assert list(nested_values(rest)) == [leaf for leaf in nested_values(nest) if not is_entity(leaf)]


@given(mixed)
def test_a_nest_without_entities_is_its_own_common_part(nest: dict[str, Any]) -> None:
    plain = dict_list_map_outplace(lambda leaf: 0 if is_entity(leaf) else leaf, nest)
    assert extract_matching_values(plain, is_entity) == ({}, plain)


@given(mixed)
def test_a_load_of_what_was_saved_restores_the_form(nest: dict[str, Any]) -> None:
    # The law behind every load: split, keep the common part, ask with the same form, graft.
    _, common = extract_matching_values(nest, is_entity)
    values = {id(leaf): ("value of", id(leaf)) for leaf in nested_values(nest) if is_entity(leaf)}
    expected = dict_list_map_outplace(lambda leaf: values[id(leaf)] if is_entity(leaf) else leaf, nest)
    assert graft(nest, copy_nest(common), values) == expected


def test_common_data_appears_even_where_it_was_not_asked_for() -> None:
    entity = Entity()
    result = graft({"a": {"x": entity}}, {"a": {"lr": 1}, "step": 7}, {id(entity): "X"})
    assert result == {"a": {"lr": 1, "x": "X"}, "step": 7}


def test_common_leaves_of_a_request_count_for_nothing() -> None:
    assert graft({"step": 0, "new": 1}, {"step": 7}, {}) == {"step": 7}


def test_lists_that_mix_entities_and_common_data_find_their_places() -> None:
    first, second = Entity(), Entity()
    filled = {id(first): "A", id(second): "B"}
    assert graft({"l": [first, 0, second, {}]}, {"l": [5, {}]}, filled) == {"l": ["A", 5, "B", {}]}
    assert graft({"l": [{"t": first, "n": 0}, {"t": second}]}, {"l": [{"n": 5}]}, filled) == {
        "l": [{"t": "A", "n": 5}, {"t": "B"}]
    }


def test_entities_that_were_not_loaded_leave_no_trace() -> None:
    gone, here = Entity(), Entity()
    filled = {id(gone): LEFT_OUT, id(here): "H"}
    assert graft({"a": gone, "l": [gone, here, 0]}, {"l": [5]}, filled) == {"l": ["H", 5]}


@pytest.mark.parametrize(
    ("request_", "common", "said"),
    [
        ({"l": ["E", 0, 0]}, {"l": [1]}, "1 list elements with common data, the state dict 2 of 3"),
        ({"a": "E"}, {"a": 1}, "the checkpoint common data"),
        ({"a": {"b": "E"}}, {"a": 3}, "the common data of the checkpoint 3"),
        ({"a": ["E"]}, {"a": {"b": 3}}, "the state dict has a list"),
    ],
)
def test_a_request_of_another_form_is_refused(request_: Any, common: Any, said: str) -> None:
    entity = Entity()
    request_ = dict_list_map_outplace(lambda leaf: entity if leaf == "E" else leaf, request_)
    with pytest.raises(CheckpointingException, match="putting the loaded state dict together") as caught:
        graft(request_, common, {id(entity): "X"})
    assert said in str(caught.value)


def test_empty_containers_stay_and_emptied_ones_go() -> None:
    nest = {"empty": [], "emptied": [Entity()], "kept": {"x": {}, "y": Entity()}}
    assert extract_matching_values(nest, is_entity)[1] == {"empty": [], "kept": {"x": {}}}


def test_lists_can_come_out_with_their_positions() -> None:
    match, rest = extract_matching_values(["a", 1, "b"], lambda leaf: isinstance(leaf, str), True)
    assert (match, rest) == ({0: "a", 2: "b"}, {1: 1})


def test_mapping_in_place_keeps_the_containers() -> None:
    nest: dict[str, Any] = {"a": [1, 2], "b": {"c": 3}}
    inner = nest["a"]
    assert dict_list_map_inplace(lambda leaf: leaf + 1, nest) is nest
    assert nest == {"a": [2, 3], "b": {"c": 4}}
    assert nest["a"] is inner


def test_leaves_come_with_their_paths() -> None:
    assert list(nested_leaves({"a": [1, {2: 3}]})) == [(("a", 0), 1), (("a", 1, 2), 3)]


def test_diff_compares_tensors_and_arrays_by_value() -> None:
    left = {"t": torch.ones(2), "l": [1, 2], "n": 1}
    assert diff(left, {"t": torch.ones(2), "l": [1, 2], "n": 1}) == ([], [], [])
    only_left, only_right, mismatch = diff(left, {"t": torch.zeros(2), "l": [1], "n": "1", "new": 0})
    assert (only_left, only_right) == ([("l", 1)], [("new",)])
    assert mismatch == [(("t",), torch.Tensor, torch.Tensor), (("n",), int, str)]


class _Incomparable:
    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


_PAIRS: list[tuple[Any, Any, bool]] = [
    ((1, np.arange(3)), (1, np.arange(3)), True),
    ((1, np.arange(3)), (1, np.arange(3) + 1), False),
    ((1, np.arange(3)), (1, np.arange(4)), False),
    (np.ones(3), np.ones((1, 3)), False),
    (np.ones(3), np.ones(3, np.float32), False),
    (np.array([np.nan]), np.array([np.nan]), True),
    (np.array(["a"]), np.array(["b"]), False),
    ((torch.ones(2), {"a": [torch.ones(3)]}), (torch.ones(2), {"a": [torch.ones(3)]}), True),
    ((torch.ones(2), {"a": [torch.ones(3)]}), (torch.ones(2), {"a": [torch.zeros(3)]}), False),
    (SimpleNamespace(a=np.ones(2)), SimpleNamespace(a=np.ones(2)), True),
    (SimpleNamespace(a=np.ones(2)), SimpleNamespace(a=np.zeros(2)), False),
    (float("nan"), float("nan"), True),
    (1, True, False),
    (_Incomparable(), _Incomparable(), False),
]


@pytest.mark.parametrize(("left", "right", "is_equal"), _PAIRS)
def test_leaves_of_every_kind_are_compared(left: Any, right: Any, is_equal: bool) -> None:
    assert diff({"x": left}, {"x": right}) == ([], [], [] if is_equal else [(("x",), type(left), type(right))])


def test_merge_adds_and_refuses_duplicates() -> None:
    assert merge({"a": {"x": 1}, "l": [{}]}, {"a": {"y": 2}, "l": [{"z": 3}]}) == {
        "a": {"x": 1, "y": 2},
        "l": [{"z": 3}],
    }
    with pytest.raises(ValueError, match="Cannot merge two lists with different lengths"):
        merge({"l": [1]}, {"l": [{}, {}]})
    with pytest.raises(ValueError, match="Duplicate non-dict and non-list values"):
        merge({"a": 1}, {"a": 2})


def test_map_reduce_groups_by_key() -> None:
    assert map_reduce(range(5), lambda x: x % 2, lambda x: x * 10, sum) == {0: 60, 1: 40}
