"""How does a model describe its tensors? The helpers that models of Megatron Core call for it.

Replica ids: a tensor that is cut over the tensor-parallel group has replicas in the data-parallel group only, any other
one in both. Groups that are not given count as one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from remesh.checkpoint.values.entities import ReplicaId, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.comm.gather import Group, group_rank, group_size

Offsets = Iterable[tuple[int, int, int]]
"""``(axis, rank, number of parts)`` of prepended axes."""


def make_tp_sharded_tensor_for_checkpoint(  # noqa: PLR0913 - the signature that users know
    tensor: torch.Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    tp_group: Group = None,
    dp_cp_group: Group = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A tensor that is cut in ``tp_axis`` over the tensor-parallel group."""
    offsets = tuple(prepend_offsets)
    if replica_id is None:
        replica_id = (0, 0, _rank(dp_cp_group))
    cut = (tp_axis + len(offsets), _rank(tp_group), _size(tp_group))
    return ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, cut, replica_id=replica_id, prepend_axis_num=len(offsets), **kwargs
    )


def make_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    tp_group: Group = None,
    dp_cp_group: Group = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A tensor that every rank of both groups has in full."""
    offsets = tuple(prepend_offsets)
    if replica_id is None:
        replica_id = (0, _rank(tp_group), _rank(dp_cp_group))
    return ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=len(offsets), **kwargs
    )


def make_sharded_object_for_checkpoint(
    obj: Any, key: str, sharded_offsets: Offsets = (), replica_id: ReplicaId | None = None, **kwargs: Any
) -> ShardedObject:
    """An object; without offsets the only one of its name."""
    offsets = tuple(sharded_offsets)
    shape = tuple(num_parts for _, _, num_parts in offsets) or (1,)
    at = tuple(rank for _, rank, _ in offsets) or (0,)
    return ShardedObject(key, obj, shape, at, (0, 0, 0) if replica_id is None else replica_id, **kwargs)


def make_sharded_tensors_for_checkpoint(  # noqa: PLR0913 - the signature that users know
    state_dict: StateDict,
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: Group = None,
    dp_cp_group: Group = None,
) -> ShardedStateDict:
    """A module's own state dict with each tensor described, and extra state as objects.

    >>> described = make_sharded_tensors_for_checkpoint({"weight": torch.zeros(2, 2)}, "layer.", {"weight": 0})
    >>> described["layer.weight"].axis_fragmentations
    (1, 1)
    """
    axes = tensor_parallel_layers_axis_map or {}
    offsets = tuple(sharded_offsets)
    described: ShardedStateDict = {}
    for name, value in state_dict.items():
        key = f"{prefix}{name}"
        groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
        if name.endswith(extra_state_suffix):
            replica = (0, _rank(tp_group), _rank(dp_cp_group))
            described[key] = make_sharded_object_for_checkpoint(value, key, offsets, replica)
        elif name in axes:
            described[key] = make_tp_sharded_tensor_for_checkpoint(
                value, key, axes[name], prepend_offsets=offsets, **groups
            )
        else:
            described[key] = make_sharded_tensor_for_checkpoint(value, key, offsets, **groups)
    return described


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    tp_group: Group = None,
) -> ShardedStateDict:
    """What the module's own ``sharded_state_dict`` says; of a module without one, its tensors uncut."""
    offsets = tuple(sharded_offsets)
    if hasattr(module, "sharded_state_dict"):
        describe: Any = module.sharded_state_dict
        described: ShardedStateDict = describe(prefix=prefix, sharded_offsets=offsets, metadata=metadata)
        return described
    dp_cp_group = (metadata or {}).get("dp_cp_group")
    state_dict = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(
        state_dict, prefix, {}, offsets, tp_group=tp_group, dp_cp_group=dp_cp_group
    )


def _rank(group: Group) -> int:
    return 0 if group is None else group_rank(group)


def _size(group: Group) -> int:
    return 1 if group is None else group_size(group)
