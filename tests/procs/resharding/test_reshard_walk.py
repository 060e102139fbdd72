"""Through how many files does a reshard of one tensor go? Counted as it runs; with -s the walk is shown."""

from __future__ import annotations

import torch
import torch.distributed as dist

from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.resharding import Resharder
from remesh.resharding.reshard_api import reshard
from remesh.resharding.running.cache import _planned
from remesh.testbed.pool import RankPool
from tests.unit.checkpoint.test_walk import walk_of


def rows_to_columns() -> tuple[dict[str, Piece], dict[str, Piece]]:
    """A matrix that each of two ranks holds four rows of, and wants two columns of."""
    rank, shape = dist.get_rank(), (8, 4)
    held, wanted = Box((4 * rank, 0), (4 * rank + 4, 4)), Box((0, 2 * rank), (8, 2 * rank + 2))
    whole = torch.arange(32.0).reshape(shape)
    give = {"w": Piece(whole[held.slices()].clone(), shape, (Shard(0, held),))}
    return give, {"w": Piece(torch.zeros(8, 2), shape, (Shard(0, wanted),))}


def walk() -> list[int]:
    """Files of a first call, of the first call of a resharder, and of the same call again."""
    reshard(*rows_to_columns())  # imports
    give, take = rows_to_columns()
    _planned.clear()
    walks = [walk_of(lambda: reshard(give, take))]
    _planned.clear()
    resharder = Resharder()
    walks += [walk_of(lambda: resharder.reshard(give, take)) for _ in range(2)]
    rank = dist.get_rank()
    assert torch.equal(take["w"].tensor, torch.arange(32.0).reshape(8, 4)[:, 2 * rank : 2 * rank + 2])
    return [len(each.called) for each in walks]


def test_a_reshard_of_one_tensor_walks_forty_files_and_eight_when_it_is_repeated(ranks: RankPool) -> None:
    for first, planned, again in ranks.run(walk, 2, timeout_s=60):
        assert first <= 40
        assert planned <= 40
        assert again <= 8
