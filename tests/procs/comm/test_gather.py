"""Ranks over gloo tell each other values of any length, also where no device of CUDA is."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from remesh.comm.gather import all_gather_json
from remesh.testbed.pool import RankPool

pytestmark = pytest.mark.procs


def _tell(lengths: list[int]) -> list[str]:
    return all_gather_json("x" * lengths[dist.get_rank()])


@pytest.mark.parametrize("lengths", [[0, 5, 1], [300_000, 0, 7], [1, 70_000, 2_000_000], [5_000, 5_000, 5_000]])
def test_values_of_any_length_are_heard_by_all(ranks: RankPool, lengths: list[int]) -> None:
    assert ranks.run(_tell, 3, (lengths,)) == [["x" * length for length in lengths]] * 3
