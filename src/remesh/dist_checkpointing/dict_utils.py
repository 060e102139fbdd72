"""The names of `remesh.checkpoint.values.nests` under the module that users of Megatron Core import."""

from remesh.checkpoint.values.nests import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
)

__all__ = [
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "map_reduce",
    "merge",
    "nested_items_iter",
    "nested_values",
]
