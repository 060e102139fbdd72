"""Random states, shared among ranks: saved by some, loaded by others, with and without sharing the work of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from remesh.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.testbed.pool import RankPool
from tests.profiles import so_many
from tests.unit.dist_checkpointing.random_states import make_catalogue, make_state, same


def save_random(root: Path, seeds: range, is_shared: bool) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        directory = root / str(seed)
        directory.mkdir(exist_ok=True)
        catalogue = make_catalogue(seed, num_tensors=12)
        strategy = get_default_save_sharded_strategy()
        mine = make_state(catalogue, 10_000 + seed, num_ranks, filled=True).parts[rank]
        whole = {"mine": mine, **catalogue.common}
        dist_checkpointing.save(whole, directory, FullyParallelSaveStrategyWrapper(strategy) if is_shared else None)


def load_random(root: Path, seeds: range, is_shared: bool) -> int:
    """The number of values that were compared."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_compared = 0
    for seed in seeds:
        catalogue = make_catalogue(seed, num_tensors=12)
        state = make_state(catalogue, 20_000 + seed, num_ranks, filled=False)
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy()) if is_shared else None
        asked = {"mine": state.parts[rank]}
        loaded = dist_checkpointing.load(asked, root / str(seed), strategy)["mine"]  # type: ignore[call-overload]
        expected = state.expected[rank]
        assert loaded.keys() == expected.keys()
        assert not [name for name in expected if not same(loaded[name], expected[name])], seed
        num_compared += len(expected)
    return num_compared


def check_round_trips(ranks: RankPool, root: Path, seeds: range, sizes: tuple[int, int], is_shared: bool) -> None:
    ranks.run(save_random, sizes[0], (root, seeds, is_shared), timeout_s=110)
    ranks.run(load_random, sizes[1], (root, seeds, not is_shared), timeout_s=110)
    assert sum(ranks.run(load_random, sizes[1], (root, seeds, is_shared), timeout_s=110))


@pytest.mark.parametrize(("sizes", "is_shared"), [((2, 3), True), ((4, 2), False)])  # all of them: the next one
def test_random_states_come_back_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, int], is_shared: bool
) -> None:
    check_round_trips(ranks, tmp_path, range(500, 500 + so_many(4, quick=2)), sizes, is_shared)


@pytest.mark.long
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (4, 2), (6, 5)])
def test_many_random_states_come_back_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, int], is_shared: bool
) -> None:
    check_round_trips(ranks, tmp_path, range(600, 610), sizes, is_shared)
