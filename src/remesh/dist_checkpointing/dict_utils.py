"""Names of `remesh.checkpoint.values.nests` under the module that users of Megatron Core import."""

from __future__ import annotations

import math
from typing import Any

import torch

from remesh.checkpoint.values import nests
from remesh.checkpoint.values.nests import (
    Path,
    dict_list_map_inplace as dict_list_map_inplace,
    dict_list_map_outplace as dict_list_map_outplace,
    dict_map as dict_map,
    dict_map_with_key as dict_map_with_key,
    extract_matching_values as extract_matching_values,
    map_reduce as map_reduce,
    merge as merge,
    nested_items_iter as nested_items_iter,
    nested_values as nested_values,
)


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """`nests.diff`, for which leaves are equal that compare equal, of whatever types.

    >>> diff({"a": 1, "b": torch.ones(2)}, {"a": 1.0, "b": torch.ones(2, dtype=torch.int32)})
    ([], [], [])
    """
    return nests.diff(x1, x2, prefix, equal=_compare_equal)


def _compare_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool((left == right).all())
    same = left == right
    if not hasattr(same, "all"):
        return bool(same)
    # One number equals an array of one element, and none of several.
    is_alike = math.prod(same.shape) == 1 or getattr(left, "shape", None) == getattr(right, "shape", None)
    return is_alike and bool(same.all())
