"""The two ends of a save and a load, for programs that write or read in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factories,
)
from remesh.checkpoint.values.nests import dict_list_map_outplace, extract_matching_values
from remesh.checkpoint.values.state_split import take_apart
from remesh.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from remesh.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity


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
        validate_sharding_integrity(determine_global_metadata(sharded)[1])
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """A copy of the request with factories built, its nonpersistent values, and the factories without data."""
    apart = take_apart(sharded_state_dict)
    nonpersistent, rest = extract_nonpersistent(apart.expanded)
    return rest, dict_list_map_outplace(LocalNonpersistentObject.unwrap, nonpersistent), apart.factories


def filter_out_empty_flatten_tensor(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """The nest without flattened slices that have no element."""

    def is_empty(leaf: Any) -> bool:
        return isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None and leaf.data_shape == (0,)

    _, kept = extract_matching_values(sharded_state_dict, is_empty)
    assert isinstance(kept, dict)
    return kept
