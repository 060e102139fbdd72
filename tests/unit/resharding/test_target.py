"""Placements of targets are counted from 0, and stay what they are."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from remesh.resharding.target import normalise


def test_dims_are_counted_from_the_first_one() -> None:
    assert normalise((Shard(-1), Replicate(), Shard(0)), 3) == (Shard(2), Replicate(), Shard(0))


def test_a_strided_shard_that_is_counted_from_the_end_keeps_its_factor() -> None:
    assert normalise((_StridedShard(-1, split_factor=2), Shard(1)), 2) == (_StridedShard(1, split_factor=2), Shard(1))
