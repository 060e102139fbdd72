"""Distribution of shards that several ranks hold among their readers or writers, and exchange of what was read.

Definitions. A *shard id* is ``(key, global_offset, (start, stop) of a flattened slice or None)``; ranks of a group
with equal ids hold replicas. A *distribution* names for each shard the one rank of the group that reads or writes it.
*Loaded* shards are those a rank has read, *unloaded* ones those it wants and another has read.

1. The ranks of the group exchange descriptions of their shards, without data.
2. Every rank computes the same distribution from that, by `distribute_shards_to_ranks`.
3. After a load, shards go from their readers to all other ranks that hold them: the planner sends each rank the bytes
   it needs and no others, in messages of bounded size, straight into the tensors that want them.

Any dtype is carried, in tensors of the group's own device, and nothing that a peer sends is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.storage import Directory
from remesh.checkpoint.values.entities import ShardedStateDict, ShardedTensor, is_main_replica
from remesh.checkpoint.values.nests import nested_values
from remesh.checkpoint.values.outline import Outline, outline_of, pack, unpack
from remesh.comm.agreement import Agreements
from remesh.comm.gather import (
    Group,
    group_size,
)
from remesh.dist_checkpointing.utils import _sharded_tensor_shard_id, _ShardId, is_float8tensor as is_float8tensor
from remesh.resharding.reshard_api import reshard

Tensors = dict[_ShardId, torch.Tensor]
Shards = dict[_ShardId, ShardedTensor]


class ShardDistribution(NamedTuple):
    """The rank of a group that reads or writes each shard; equal on all ranks."""

    main_rank_for_shard: dict[_ShardId, int]
    """Rank in the group, for every shard that the group deals with."""
    shards_in_this_group: set[_ShardId]
    """Shards whose main replica is in this group."""
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    """A description of each shard."""
    all_ranks_for_shard: dict[_ShardId, list[int]]
    """Ranks in the group that hold it, ascending."""


def _shard_size(sh_ten: ShardedTensor) -> int:
    """Bytes of a shard's data."""
    return math.prod(sh_ten.data_shape) * sh_ten.dtype.itemsize


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[_ShardId, Sequence[int]],
    shard_to_size: Mapping[_ShardId, int],
    num_ranks: int,
    cross_parallelization_group_loads: Iterable[_ShardId] = (),
) -> dict[_ShardId, int]:
    """One of its ranks for each shard, so that ranks get about as many bytes; a pure function of its arguments.

    Each shard goes to the rank that has the fewest bytes so far of those that hold it, the lowest of equals. First come
    shards with few holders, which have the least choice; of as many the largest; of equal ones those of lower id.
    Shards of ``cross_parallelization_group_loads`` have their main replica outside the group: they are shared out
    after all others, so that what a group saves is what it loads.
    """
    for shard, ranks in shard_to_ranks.items():
        if not ranks or min(ranks) < 0 or max(ranks) >= num_ranks:
            raise CheckpointMismatchError(
                f"sharing out shards: {shard} is held by ranks {list(ranks)}, expected some of 0 .. {num_ranks - 1}"
            )
    outside = set(cross_parallelization_group_loads)
    num_bytes = [0] * num_ranks
    chosen: dict[_ShardId, int] = {}

    def order(shard: _ShardId) -> tuple[Any, ...]:
        return shard in outside, len(shard_to_ranks[shard]), -shard_to_size[shard], _order_of(shard)

    for shard in sorted(shard_to_ranks, key=order):
        chosen[shard] = min(shard_to_ranks[shard], key=lambda rank: (num_bytes[rank], rank))
        num_bytes[chosen[shard]] += shard_to_size[shard]
    return chosen


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    ignore_groups: bool = False,
    pg_cache_path: Directory | None = None,
    pg_cache_create: bool = False,
    *,
    plans: Agreements | None = None,
) -> ShardDistribution | None:
    """The distribution of the group's shards; None for a group of one, where there is nothing to share.

    Called by every rank of the group; blocks until all have called it. Without ``ignore_groups`` only shards whose main
    replica is in this group count, which is right for a save; a load needs all shards. ``plans`` remembers the
    distribution of shards that do not change. ``pg_cache_path`` and ``pg_cache_create`` change nothing.
    """
    if group_size(parallelization_group) <= 1:
        return None
    plans = plans or Agreements(max_kept=0)
    agreement = plans.agree(
        lambda: ([*_describe(sharded_state_dict), ignore_groups], None),
        parallelization_group,
        "sharing out the shards of a group",
        about="distribution",
    )
    kept = agreement.agreed.kept
    if agreement.told is not None:
        kept["distribution"] = _build_shard_distribution([sent[:-1] for sent in agreement.told], ignore_groups)
        plans.remember(agreement)
    distribution: ShardDistribution = kept["distribution"]
    return distribution


def _build_shard_distribution(by_rank: Sequence[Sequence[Any]], ignore_groups: bool) -> ShardDistribution:
    """The distribution of what each rank has sent by `_describe`. Ranks that sent the same are dealt with once."""
    ranks_of: dict[_ShardId, list[int]] = {}
    described: dict[_ShardId, ShardedTensor] = {}
    mains: set[_ShardId] = set()
    alike: dict[tuple[int, int, int], list[int]] = {}
    for rank, (form, places, ranges, _) in enumerate(by_rank):
        alike.setdefault((id(form), id(places), id(ranges)), []).append(rank)
    for ranks in alike.values():
        shards = _described(*by_rank[ranks[0]][:3])
        for name, shard in shards.items():
            first = described.setdefault(name, shard)
            if (first.dtype, first.data_shape) != (shard.dtype, shard.data_shape):
                raise CheckpointMismatchError(
                    f"sharing out the shards of a group: {name} is {first.dtype} of shape {first.data_shape} on rank "
                    f"{ranks_of[name][0]} and {shard.dtype} of shape {shard.data_shape} on rank {ranks[0]}, expected "
                    "identical replicas; load without the fully parallel strategy"
                )
            held = ranks_of.get(name)
            ranks_of[name] = list(ranks) if held is None else sorted(held + ranks)
        names = list(shards)
        for rank in ranks:
            mains.update(names[at] for at in unpack(by_rank[rank][3]).tolist())
    sizes = {name: _shard_size(shard) for name, shard in described.items()}
    counted = {name: ranks for name, ranks in ranks_of.items() if ignore_groups or name in mains}
    outside = ranks_of.keys() - mains if ignore_groups else ()
    chosen = distribute_shards_to_ranks(counted, sizes, len(by_rank), outside)
    return ShardDistribution(chosen, mains, described, ranks_of)


def exchange_by_distribution(
    loaded_tensors: Tensors,
    unloaded_shards: Shards,
    shard_distribution: ShardDistribution,
    parallelization_group: Group = None,
    exchange_algo: str = "planned",
) -> Tensors:
    """All tensors that this rank wants: those it has loaded, and the others from the ranks that have.

    Called by every rank of the group; blocks until it has all. Unloaded shards that have data are filled in place. A
    plan of the whole exchange sends each shard to the ranks that want it, and to no others.
    """
    check_exchange_algo(exchange_algo)
    holders = shard_distribution.all_ranks_for_shard
    shared = [shard for shard in shard_distribution.main_rank_for_shard if len(holders[shard]) > 1]
    names = {shard: f"{index}:{shard[0]}" for index, shard in enumerate(shared)}
    result = dict(loaded_tensors)
    for shard, wanted in unloaded_shards.items():
        data = wanted.data
        result[shard] = (
            torch.empty(wanted.data_shape, dtype=wanted.dtype, device="cpu") if data is None else data.detach()
        )
    give = {names[shard]: tensor.detach().contiguous() for shard, tensor in loaded_tensors.items() if shard in names}
    take = {names[shard]: result[shard] for shard in unloaded_shards if shard in names}
    reshard(give, take, group=parallelization_group)
    return result


# Users know ways of the exchange by name. They differ in nothing that a caller can see but time and memory, and the
# planned one is the best of them in both.
exchange_loaded_tensors_broadcast = exchange_by_distribution
exchange_loaded_tensors_gather_rounds = exchange_by_distribution
exchange_loaded_tensors_gather_object = exchange_by_distribution
EXCHANGE_ALGOS = ("planned", "broadcast", "gather_rounds", "gather_object")


def check_exchange_algo(name: str) -> None:
    """Raise NotImplementedError for a name that no way of the exchange has."""
    if name not in EXCHANGE_ALGOS:
        raise NotImplementedError(
            f"exchanging loaded tensors: unknown algorithm {name!r}, expected one of {', '.join(EXCHANGE_ALGOS)}"
        )


_NOT_FLATTENED = (-1, -1)


def _describe(sharded_state_dict: ShardedStateDict) -> list[Any]:
    """Description of a rank's distinct shards, as JSON: form, places, slices, and which are main replicas."""
    shards: dict[_ShardId, ShardedTensor] = {}
    mains: set[_ShardId] = set()
    for one in nested_values(sharded_state_dict):
        if isinstance(one, ShardedTensor):
            name = _sharded_tensor_shard_id(one)
            first = shards.setdefault(name, one)
            if (first.dtype, first.data_shape) != (one.dtype, one.data_shape):
                raise CheckpointMismatchError(
                    f"sharing out the shards of a group: {name} is requested as {first.dtype} and {one.dtype} by one "
                    "rank, expected one of them; load without the fully parallel strategy"
                )
            if is_main_replica(one.replica_id):
                mains.add(name)
    places = [number for one in shards.values() for number in (*one.global_offset, 0)]
    ranges = [number for _, _, held in shards for number in held or _NOT_FLATTENED]
    is_main = [at for at, name in enumerate(shards) if name in mains]
    return [outline_of(shards.values()).form, pack(places), pack(ranges), pack(is_main)]


def _described(form: Sequence[Any], places: str, ranges: str) -> Shards:
    """The shards, in order, that `_describe` was given."""
    shards: Shards = {}
    bounds = unpack(ranges).reshape(-1, 2).tolist()
    for shard, held in zip(Outline(form, unpack(places)).entities(), bounds, strict=True):
        assert isinstance(shard, ShardedTensor)
        shard.flattened_range = None if tuple(held) == _NOT_FLATTENED else slice(*held)
        shards[_sharded_tensor_shard_id(shard)] = shard
    return shards


def _order_of(shard: _ShardId) -> tuple[Any, ...]:
    key, offset, held = shard
    return key, offset, held is not None, held or ()
