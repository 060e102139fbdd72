"""The two ends of a save and a load, for programs that write or read in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remesh.checkpoint.plan.flattened import unflatten_all
from remesh.checkpoint.values.checks import validate_sharding_integrity
from remesh.checkpoint.values.description import describe, entities_from
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factories,
)
from remesh.checkpoint.values.nests import extract_matching_values
from remesh.checkpoint.values.state_split import expand, split
from remesh.comm.gather import gather_from
from remesh.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
) -> tuple[ShardedStateDict, StateDict]:
    """The sharded part and the common part of what is to be saved; factories are built in place.

    Called by every rank: with ``validate_access_integrity`` all check together that the parts fit, and raise alike.
    """
    apply_factories(sharded_state_dict)
    _, persistent = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(persistent)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        entities, _, _ = split(sharded)
        told = gather_from(lambda: describe(unflatten_all(entities)), None, "checking what is to be saved")
        validate_sharding_integrity([entities_from(descriptions) for descriptions in told])
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """A copy of the request with factories built, its nonpersistent values, and the factories without data."""
    expanded, factories = expand(sharded_state_dict)
    nonpersistent, rest = extract_nonpersistent(expanded)
    return rest, _unwrapped(nonpersistent), factories


def filter_out_empty_flatten_tensor(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """The nest without flattened slices that have no element."""

    def is_empty(leaf: Any) -> bool:
        return isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None and leaf.data_shape == (0,)

    _, kept = extract_matching_values(sharded_state_dict, is_empty)
    assert isinstance(kept, dict)
    return kept


def _unwrapped(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _unwrapped(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return [_unwrapped(value) for value in nest]
    return nest.unwrap() if isinstance(nest, LocalNonpersistentObject) else nest
