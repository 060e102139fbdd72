"""Strategy objects as users pass them: any pairing of plain and fully parallel ones gives the same state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.exchange_utils import EXCHANGE_ALGOS, determine_main_replica_uniform_distribution
from remesh.dist_checkpointing.strategies import torch as strategies_torch
from remesh.dist_checkpointing.strategies.base import LoadShardedStrategy
from remesh.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from remesh.testbed.pool import RankPool

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def state(num_copies: int, *, filled: bool) -> dict[str, Any]:
    """A grid of shards with ``num_copies`` replicas of each, tensors of several dtypes, objects and common data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part, copy, num_parts = rank // num_copies, rank % num_copies, world_size // num_copies
    tensors: list[Any] = []
    for number, dtype in enumerate(DTYPES):
        rows, cols = 8 // num_parts, 5 + number
        whole = (torch.arange(8 * cols).reshape(8, cols) % 7).to(dtype)
        local = whole[rows * part : rows * (part + 1)].clone()
        if not filled:
            local = torch.zeros(rows, cols).to(dtype)
        tensors.append(ShardedTensor.from_rank_offsets(f"t{number}", local, (0, part, num_parts), replica_id=copy))
    strided = torch.arange(12.0).reshape(3, 4).t() if filled else torch.zeros(3, 4).t()
    return {
        "tensors": tensors,
        "strided": ShardedTensor.from_rank_offsets("strided", strided, replica_id=rank),
        "empty": ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3), replica_id=rank),
        "rng": ShardedObject("rng", {"part": part} if filled else None, (num_parts,), (part,), replica_id=copy),
        "step": 7,
    }


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, wanted in zip(DTYPES, expected["tensors"], strict=True):
        assert found["tensors"][DTYPES.index(name)].dtype == wanted.dtype
    for have, wanted in zip(found["tensors"], expected["tensors"], strict=True):
        assert torch.equal(have.view(torch.uint8), wanted.data.view(torch.uint8)), wanted
    assert torch.equal(found["strided"], expected["strided"].data)
    assert found["empty"].shape == (0, 3)
    assert found["rng"] == expected["rng"].data
    assert found["step"] == 7


def pair_strategies(root: Path, num_copies: int) -> None:
    base_save = TorchDistSaveShardedStrategy("torch_dist", 1)
    base_load = TorchDistLoadShardedStrategy()
    saves = {"plain": base_save, "parallel": FullyParallelSaveStrategyWrapper(base_save)}
    loads: dict[str, Any] = {"none": None, "tuple": ("torch_dist", 1), "plain": base_load}
    for algo in EXCHANGE_ALGOS:
        loads[algo] = FullyParallelLoadStrategyWrapper(base_load, exchange_algo=algo)
    assert saves["parallel"].backend == base_save.backend == "torch_dist"
    expected = state(num_copies, filled=True)
    for saved, save in saves.items():
        dist_checkpointing.save(state(num_copies, filled=True), root / saved, save)
        for load in loads.values():
            request = state(num_copies, filled=False)
            places = [one.data.data_ptr() for one in request["tensors"]]
            loaded = dist_checkpointing.load(request, root / saved, load)
            assert isinstance(loaded, dict)
            check_equal(loaded, expected)
            assert [one.data_ptr() for one in loaded["tensors"]] == places, "filled in place"


@pytest.mark.parametrize("num_copies", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_save_strategy_goes_with_every_load_strategy(ranks: RankPool, tmp_path: Path, num_copies: int) -> None:
    for name in ("plain", "parallel"):
        (tmp_path / name).mkdir()
    ranks.run(pair_strategies, 4, (tmp_path, num_copies))


def seed_sample(ckpt_root: Path) -> None:
    """The sample that every user knows, with only the import changed."""
    base_save_strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    base_load_strategy = TorchDistLoadShardedStrategy()

    def basic_save_load(sharded_state_dict: Any, ckpt_dir: Any) -> Any:
        dist_checkpointing.save(sharded_state_dict, ckpt_dir, base_save_strategy)
        return dist_checkpointing.load(sharded_state_dict, ckpt_dir, base_load_strategy)

    def fully_parallel_save_load(sharded_state_dict: Any, ckpt_dir: Any) -> Any:
        fully_parallel_save_strategy = FullyParallelSaveStrategyWrapper(base_save_strategy)
        assert fully_parallel_save_strategy.backend == base_save_strategy.backend == "torch_dist"
        fully_parallel_load_strategy = FullyParallelLoadStrategyWrapper(base_load_strategy)
        dist_checkpointing.save(sharded_state_dict, ckpt_dir, fully_parallel_save_strategy)
        return dist_checkpointing.load(sharded_state_dict, ckpt_dir, fully_parallel_load_strategy)

    for number, run in enumerate((basic_save_load, fully_parallel_save_load)):
        ckpt_dir = ckpt_root / str(number)
        ckpt_dir.mkdir(exist_ok=True)
        dist.barrier()
        check_equal(run(state(2, filled=True), str(ckpt_dir)), state(2, filled=True))


def test_the_sample_of_strategies_runs_with_only_the_import_changed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(seed_sample, 4, (tmp_path,))


def save_replicated(directory: Path, cached: bool) -> list[int]:
    rank = dist.get_rank()
    wrapped = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), do_cache_distribution=cached)
    for number in range(2):
        tensors = {
            f"t{at}": ShardedTensor.from_rank_offsets(f"t{at}", torch.full((1000 + at,), at), replica_id=(0, rank))
            for at in range(40)
        }
        if rank == 0:
            (directory / str(number)).mkdir()
        dist.barrier()
        dist_checkpointing.save(tensors, directory / str(number), wrapped)
    assert (wrapped.cached_distribution is not None) == cached
    plain = dist_checkpointing.load_plain_tensors(directory / "1")
    assert all(plain[f"t{at}"].eq(at).all() for at in range(40))
    return [(directory / "1" / f"__{one}_0.distcp").stat().st_size for one in range(dist.get_world_size())]


@pytest.mark.parametrize("cached", [False, True])
def test_replicas_share_the_writing(ranks: RankPool, tmp_path: Path, cached: bool) -> None:
    sizes = ranks.run(save_replicated, 4, (tmp_path, cached))[0]
    assert max(sizes) <= 1.05 * sum(sizes) / len(sizes)


def count_reads(directory: Path, algo: str) -> tuple[list[str], int]:
    """Keys of the tensors that this rank reads itself, out of 12 that all want."""
    rank = dist.get_rank()
    request = {
        f"t{at}": ShardedTensor.from_rank_offsets(f"t{at}", torch.zeros(100), replica_id=rank) for at in range(12)
    }
    read: list[str] = []

    class Counting(TorchDistLoadShardedStrategy):
        def load(self, sharded_state_dict: Any, *args: Any, **options: Any) -> Any:
            read.extend(one.key for one in sharded_state_dict.values())
            return super().load(sharded_state_dict, *args, **options)

    loaded = dist_checkpointing.load(
        request, directory, FullyParallelLoadStrategyWrapper(Counting(), exchange_algo=algo)
    )
    assert all(loaded[f"t{at}"].eq(at).all() for at in range(12))  # type: ignore[call-overload]
    return read, len(loaded)


@pytest.mark.parametrize("algo", ["broadcast", "planned"])
def test_each_shard_is_read_once_in_the_group(ranks: RankPool, tmp_path: Path, algo: str) -> None:
    whole = {f"t{at}": ShardedTensor.from_rank_offsets(f"t{at}", torch.full((100,), float(at))) for at in range(12)}
    dist_checkpointing.save(whole, tmp_path)
    reads = [read for read, _ in ranks.run(count_reads, 4, (tmp_path, algo))]
    assert sorted(key for read in reads for key in read) == sorted(whole)
    assert [len(read) for read in reads] == [3, 3, 3, 3]


def save_in_groups(directory: Path) -> None:
    """Two groups of two, each with replicas; main replicas are in the first group only."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]

    def make(filled: bool) -> dict[str, Any]:
        return {
            f"t{at}": ShardedTensor.from_rank_offsets(f"t{at}", torch.full((10,), at * filled), replica_id=rank)
            for at in range(6)
        }

    request = make(True)
    dist_checkpointing.save(
        request, directory, FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), parallelization_group=mine)
    )
    written = sum(one.replica_id == 0 for one in request.values())
    assert written == 0 if rank >= 2 else True
    for algo in EXCHANGE_ALGOS:
        wrapper = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), mine, exchange_algo=algo)
        loaded = dist_checkpointing.load(make(False), directory, wrapper)
        assert all(loaded[f"t{at}"].eq(at).all() for at in range(6))  # type: ignore[call-overload]


def test_groups_that_are_not_the_world(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_in_groups, 4, (tmp_path,))


def fail_on_one(directory: Path) -> list[str]:
    told = []
    rank = dist.get_rank()
    request = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4), replica_id=rank)}
    if rank == 1:
        request["b"] = ShardedTensor.from_rank_offsets("b", torch.zeros(4))
    wrapper = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), exchange_algo="planned")
    wrong = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4, dtype=(torch.int8, torch.int64)[rank % 2]))}
    for act in (
        lambda: dist_checkpointing.load(request, directory, wrapper),
        lambda: determine_main_replica_uniform_distribution(wrong, None),  # type: ignore[arg-type]
        lambda: dist_checkpointing.load(request, directory, "torch_dist"),  # type: ignore[arg-type]
    ):
        with pytest.raises(CheckpointingException) as caught:
            act()
        told.append(str(caught.value))
    return told


def test_failures_of_the_exchange_are_told_alike_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(4))}, tmp_path)
    answers = ranks.run(fail_on_one, 3, (tmp_path,))
    assert all(answer == answers[0] for answer in answers)
    assert "'b'" in answers[0][0]
    assert "torch.int8" in answers[0][1]
    assert "expected a LoadShardedStrategy" in answers[0][2]


def test_unknown_algorithms_and_settings_are_refused() -> None:
    base = strategies_torch.TorchDistLoadShardedStrategy()
    with pytest.raises(NotImplementedError, match="'guess'"):
        FullyParallelLoadStrategyWrapper(base, exchange_algo="guess")
    with pytest.raises(CheckpointingException, match="'zarr'"):
        TorchDistSaveShardedStrategy("zarr", 1)
    with pytest.raises(CheckpointingException, match="version 2"):
        base.check_version_compatibility(2)


def save_unlike(directory: Path) -> list[str]:
    """Common data that differs on rank 1, once in what is compared and once in what is not."""
    rank = dist.get_rank()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("remesh.checkpoint.run.common_data")
    logger.addHandler(handler)
    try:
        for name in ("compared", "not"):
            (directory / name).mkdir(exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(
                {"step": rank, "args": {f"only{rank}": 1}, "same": [1, 2]},
                directory / name,
                preprocess_common_before_consistancy_check=None if name == "compared" else lambda common: {"same": 1},
            )
    finally:
        logger.removeHandler(handler)
    assert dist_checkpointing.load_common_state_dict(directory / "not")["step"] == 0
    return told


def test_common_data_that_differs_is_told_where_it_differs(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(save_unlike, 2, (tmp_path,))
    assert first == []
    assert len(second) == 1
    assert second[0].startswith("Rank 1 common state dict differs from rank 0 common state dict. ")
    assert "Keys only on rank 0: [('args', 'only0')], Keys only on 1: [('args', 'only1')]" in second[0]
    assert "Mismatched keys: [(('step',), <class 'int'>, <class 'int'>)]" in second[0]


class Failing(LoadShardedStrategy):
    """A program's own strategy, which fails on one rank and tells nobody."""

    can_handle_sharded_objects = True  # type: ignore[assignment]

    def check_backend_compatibility(self, loaded_backend: str) -> None: ...

    def check_version_compatibility(self, loaded_version: int) -> None: ...

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, ShardedTensor]:
        return {}

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("a fault of its own")
        return sharded_state_dict


def load_with_a_failing_strategy(directory: Path) -> list[str]:
    told = []
    for strategy in (Failing(), FullyParallelLoadStrategyWrapper(Failing())):
        request = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4), replica_id=dist.get_rank())}
        with pytest.raises(ValueError, match="a fault of its own") as caught:
            dist_checkpointing.load(request, directory, strategy)
        told.append(str(caught.value))
    return told


def test_a_strategy_that_fails_on_one_rank_fails_on_all(ranks: RankPool, tmp_path: Path) -> None:
    dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(4))}, tmp_path)
    answers = ranks.run(load_with_a_failing_strategy, 3, (tmp_path,))
    assert all("rank 1" in text for answer in answers for text in answer)
