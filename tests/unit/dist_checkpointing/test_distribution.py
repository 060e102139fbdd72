"""Who writes a shard that several ranks hold: in the documented order, by the least loaded of its holders."""

from __future__ import annotations

import random

import pytest

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.dist_checkpointing.exchange_utils import distribute_shards_to_ranks
from remesh.dist_checkpointing.utils import _ShardId
from tests.profiles import seeds


def share_out_slowly(
    ranks_of: dict[_ShardId, list[int]], size_of: dict[_ShardId, int], outside: set[_ShardId]
) -> dict[_ShardId, int]:
    """Pick the next shard by looking through all that are left, as the rule reads."""
    left, chosen = set(ranks_of), dict[_ShardId, int]()
    while left:
        inside = left - outside or left
        fewest = min(len(ranks_of[one]) for one in inside)
        few = [one for one in inside if len(ranks_of[one]) == fewest]
        largest = max(size_of[one] for one in few)
        shard = min(one for one in few if size_of[one] == largest)
        load = {rank: sum(size_of[one] for one in chosen if chosen[one] == rank) for rank in ranks_of[shard]}
        chosen[shard] = min(rank for rank in load if load[rank] == min(load.values()))
        left.remove(shard)
    return chosen


@pytest.mark.parametrize("seed", seeds(20, quick=8))
def test_shards_are_given_out_by_few_holders_then_size_then_id(seed: int) -> None:
    pick = random.Random(seed)
    shards: list[_ShardId] = [(f"w{number % 4}", (number,), None) for number in range(12)]
    pick.shuffle(shards)
    ranks_of = {one: sorted(pick.sample(range(5), pick.randint(1, 5))) for one in shards}
    size_of = {one: pick.choice([0, 1, 5, 5, 8]) for one in shards}
    outside = {one for one in shards if pick.random() < 0.3}
    found = distribute_shards_to_ranks(ranks_of, size_of, 5, outside)
    assert found == share_out_slowly(ranks_of, size_of, outside)


def test_a_small_shard_with_few_holders_comes_before_a_large_one() -> None:
    few, many = ("few", (0,), None), ("many", (0,), None)
    assert distribute_shards_to_ranks({many: [0, 1, 2], few: [0, 1]}, {many: 9, few: 1}, 3) == {few: 0, many: 1}


@pytest.mark.parametrize("ranks", [[], [0, 3], [-1]])
def test_holders_outside_the_group_are_refused(ranks: list[int]) -> None:
    shard = ("w", (0,), None)
    with pytest.raises(CheckpointMismatchError, match="expected some of 0 .. 2"):
        distribute_shards_to_ranks({shard: ranks}, {shard: 1}, 3)
