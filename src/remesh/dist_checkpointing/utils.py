"""Functions on sharded state dicts that programs import by name: parts by kind, prefixes of keys, timing logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from remesh.checkpoint.values.nests import dict_list_map_inplace, extract_matching_values

_ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]
"""Key, global offset, and start and stop of a flattened slice."""


def zip_strict(*args: Any) -> Iterator[tuple[Any, ...]]:
    """`zip` of lists that refuses other lengths at once."""
    lists = [list(one) for one in args]
    if len({*map(len, lists)}) > 1:
        raise CheckpointMismatchError(f"putting lists side by side: found lengths {[*map(len, lists)]}, expected one")
    return zip(*lists, strict=True)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """Identity of a shard in the checkpoint; equal for replicas."""
    held = sharded_tensor.flattened_range
    return (sharded_tensor.key, sharded_tensor.global_offset, None if held is None else (held.start, held.stop))


def _sharded_object_id(sharded_object: ShardedObject) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Identity of an element in the checkpoint; equal for replicas."""
    return (sharded_object.key, sharded_object.global_offset, sharded_object.global_shape)


def _parts(*kinds: type) -> Callable[[ShardedStateDict], tuple[Any, Any]]:
    """What splits a nest into the leaves of these kinds, and everything else."""

    def extract(sharded_state_dict: ShardedStateDict) -> tuple[Any, Any]:
        return extract_matching_values(sharded_state_dict, lambda leaf: isinstance(leaf, kinds))

    return extract


extract_sharded_tensors = _parts(ShardedTensor)
extract_sharded_tensors_and_factories = _parts(ShardedTensor, ShardedTensorFactory)
extract_sharded_tensors_or_nonpersistent = _parts(ShardedTensor, LocalNonpersistentObject, ShardedTensorFactory)
extract_sharded_base = _parts(ShardedBase)
extract_nonpersistent = _parts(LocalNonpersistentObject)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put the prefix before the key of every entity, in place; places in the dict stay.

    >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1))}
    >>> add_prefix_for_sharding(state, "model.")
    >>> state["w"].key
    'model.w'
    """
    _rename(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of every key, in place; ValueError when a key does not start with it."""

    def renamed(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"Expected {key} to begin with prefix {old_prefix}")
        return f"{new_prefix}{key[len(old_prefix) :]}"

    _rename(sharded_state_dict, renamed)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replace prefixes of keys, in place: of each key the first that it starts with, in the order of the mapping."""

    def renamed(key: str) -> str:
        for old, new in prefix_map.items():
            if key.startswith(old):
                return f"{new}{key[len(old) :]}"
        return key

    _rename(sharded_state_dict, renamed)


def _rename(nest: ShardedStateDict, renamed: Callable[[str], str]) -> None:
    def rename(leaf: Any) -> Any:
        if isinstance(leaf, ShardedBase):
            leaf.key = renamed(leaf.key)
        return leaf

    dict_list_map_inplace(rename, nest)


def is_float8tensor(tensor: object) -> bool:
    """Whether this is a tensor subclass of quantised values with its own scale, as some libraries have."""
    return type(tensor).__name__.endswith("Float8Tensor")


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace data that is a tensor subclass of scaled 8-bit values by its values in full, in place."""

    def dequantised(leaf: Any) -> Any:
        data = getattr(leaf, "data", None)
        if isinstance(leaf, ShardedTensor) and is_float8tensor(data):
            assert isinstance(data, torch.Tensor)
            leaf.data = data.dequantize()
            leaf.dtype = leaf.data.dtype
        return leaf

    dict_list_map_inplace(dequantised, sharded_state_dict)


def _clean_metadata_for_serialization(metadata: StateDict | None) -> StateDict | None:
    """A copy of the application's description without process groups, which cannot be stored."""
    if metadata is None:
        return None
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


@contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Generator[None, None, None]:
    """Log how long the block took, if that is more than ``threshold`` seconds, with a logger called ``name``."""
    inner = (logger or logging.getLogger(__name__)).getChild(name)
    start_s = time.perf_counter()
    try:
        yield
    finally:
        if (took_s := time.perf_counter() - start_s) > threshold:
            inner.log(logging.DEBUG if level is None else level, "%s took %.4fs", inner.name, took_s)
