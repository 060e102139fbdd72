"""What goes wrong on one rank is told on all, in bounded time, and leaves no checkpoint behind."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.run import writer
from remesh.checkpoint.storage.checked_file import CheckedFile
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from remesh.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy
from remesh.foundation.errors import FormatError, LayoutError, PeerError, StorageError
from remesh.foundation.options import OptionError
from remesh.integrations.dcp import DcpWriter
from remesh.testbed.pool import DIED, RankPool


def told(act: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Type and text of the error that the act must raise."""
    try:
        act()
    except (Exception, dcp.api.CheckpointException) as raised:
        return type(raised), str(raised)
    raise AssertionError("nothing was raised")


def same_on_all(answers: list[tuple[type[BaseException], str]]) -> tuple[type[BaseException], str]:
    assert len(set(answers)) == 1, answers
    return answers[0]


def part() -> ShardedTensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, world_size))


def held_by_all() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=dist.get_rank())


def load_without_memory(directory: Path) -> tuple[type[BaseException], str]:
    """Rank 1 has no memory to read into, for a while; what is loaded after that is whole."""
    remesh.save({"w": torch.arange(1 << 18, dtype=torch.float64)}, directory)

    def refuse(self: CheckedFile, *args: Any) -> None:
        raise MemoryError("Unable to allocate 4.00 MiB for an array")

    wanted = {"w": torch.zeros(1 << 18)}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(CheckedFile, "use_later", refuse)
        answer = told(lambda: remesh.load(wanted, directory))
    remesh.load(wanted, directory)
    assert torch.equal(wanted["w"], torch.arange(float(1 << 18)))
    return answer


def test_a_rank_without_memory_for_what_it_reads_is_told_on_all(ranks: RankPool, tmp_path: Path) -> None:
    _, text = same_on_all(ranks.run(load_without_memory, 2, (tmp_path / "c",)))
    assert "Unable to allocate 4.00 MiB" in text
    assert "rank 1" in text and str(tmp_path / "c") in text


def save_with_a_bad_object(directory: Path, culprit: int) -> tuple[type[BaseException], str]:
    rank = dist.get_rank()
    data: Any = (lambda: 0) if rank == culprit else 0
    state = {"w": part(), "o": ShardedObject("o", data, (dist.get_world_size(),), (rank,))}
    return told(lambda: dist_checkpointing.save(state, directory))


def test_an_object_that_cannot_be_saved_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    kind, text = same_on_all(ranks.run(save_with_a_bad_object, 4, (tmp_path, 2)))
    assert issubclass(kind, CheckpointingException)
    assert "object 'o/shard_2_4'" in text
    assert "rank 2" in text
    assert not list(tmp_path.iterdir())


def save_with_a_gap(directory: Path) -> tuple[type[BaseException], str]:
    state = {} if dist.get_rank() == 1 else {"w": part()}
    return told(lambda: dist_checkpointing.save(state, directory))


def test_a_rank_that_forgets_its_part(ranks: RankPool, tmp_path: Path) -> None:
    kind, text = same_on_all(ranks.run(save_with_a_gap, 4, (tmp_path,)))
    assert issubclass(kind, CheckpointingException)
    assert "Invalid access pattern for 'w'" in text
    assert "[2:4]" in text
    assert not list(tmp_path.iterdir())


def save_with_a_full_disk(directory: Path, culprit: int) -> tuple[type[BaseException], str]:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == culprit:
            patch.setattr(writer, "write_data_file", full)
        failed = told(lambda: dist_checkpointing.save({"w": part()}, directory))
    assert not dist_checkpointing.check_is_distributed_checkpoint(directory)
    dist.barrier()
    dist_checkpointing.save({"w": part()}, directory)
    assert dist_checkpointing.load_plain_tensors(directory)["w"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    return failed


def test_a_full_disk_on_one_rank_and_the_save_after_it(ranks: RankPool, tmp_path: Path) -> None:
    kind, text = same_on_all(ranks.run(save_with_a_full_disk, 4, (tmp_path, 3)))
    assert issubclass(kind, StorageError)
    assert "No space left on device" in text
    assert "rank 3" in text


def save_and_die(directory: Path, culprit: int) -> type[BaseException]:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == culprit:
            patch.setattr(writer, "write_data_file" if culprit else "stage_index", die)
        return told(lambda: dist_checkpointing.save({"w": part()}, directory))[0]


def save_again(directory: Path) -> None:
    assert not dist_checkpointing.check_is_distributed_checkpoint(directory)
    dist.barrier()
    dist_checkpointing.save({"w": part()}, directory)
    assert dist_checkpointing.load_plain_tensors(directory)["w"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_killed_in_the_middle_leaves_nothing_visible(ranks: RankPool, tmp_path: Path, culprit: int) -> None:
    answers = ranks.run(save_and_die, 4, (tmp_path, culprit), dying={culprit})
    assert answers.pop(culprit) is DIED
    assert all(issubclass(kind, PeerError) for kind in answers)
    assert not (tmp_path / "metadata.json").exists()
    ranks.run(save_again, 2, (tmp_path,))


def load_badly(root: Path) -> dict[str, tuple[type[BaseException], str]]:
    rank = dist.get_rank()
    mine = torch.zeros(4)
    on_one: dict[str, Any] = {"w": mine, "new": torch.zeros(1)} if rank == 1 else {"w": mine}
    wrong: dict[str, Any] = {"w": torch.zeros(5)} if rank == 1 else {"w": mine}
    answers = {
        "missing": told(lambda: remesh.load({"w": mine}, root / "nowhere")),
        "incomplete": told(lambda: remesh.load({"w": mine}, root / "incomplete")),
        "truncated": told(lambda: remesh.load({"w": mine}, root / "truncated")),
        "key": told(lambda: remesh.load(on_one, root / "good")),
        "shape": told(lambda: remesh.load(wrong, root / "good")),
        "taken": told(lambda: remesh.save({"w": mine}, root / "good")),
    }
    assert not mine.any(), "no failed load has changed a tensor"
    remesh.load({"w": mine}, root / "good")
    assert mine.eq(1).all()
    return answers


def test_bad_checkpoints_are_told_alike_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("good", "incomplete", "truncated"):
        remesh.save({"w": torch.ones(4)}, tmp_path / name)
    (tmp_path / "incomplete" / "metadata.json").unlink()
    (tmp_path / "incomplete" / ".metadata").unlink()
    data = tmp_path / "truncated" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-10])
    before = {path: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    answers = ranks.run(load_badly, 3, (tmp_path,))
    expected = {
        "missing": (StorageError, "does not exist"),
        "incomplete": (FormatError, "is not a distributed checkpoint"),
        "truncated": (FormatError, "expected 1609 bytes, found 1599"),
        "key": (LayoutError, "'new'"),
        "shape": (LayoutError, "Global shape mismatch for loaded ((4,)) and expected ((5,))"),
        "taken": (StorageError, "already holds a complete checkpoint"),
    }
    for case, (kind, said) in expected.items():
        found, text = same_on_all([answer[case] for answer in answers])
        assert issubclass(found, kind), case
        assert issubclass(found, CheckpointingException), case
        assert said in text
    assert {path: path.read_bytes() for path in (tmp_path / "good").iterdir()} == before


def save_in_groups(root: Path) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    at = dist.get_rank(mine)
    shard = ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, at, 2))
    directory = root / str(rank % 2)
    if at == 0:
        directory.mkdir()
    dist.barrier(mine)
    dist_checkpointing.save({"w": shard}, directory, process_group=mine)
    want = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1 - at, 2))
    loaded = dist_checkpointing.load({"w": want}, directory, process_group=mine)
    assert loaded["w"].eq(2 - rank + 2 * (rank % 2)).all()
    state = {"w": torch.zeros(4)}
    remesh.load(state, directory, group=mine)
    assert state["w"].tolist() == [rank % 2] * 2 + [rank % 2 + 2] * 2


def test_disjoint_groups_save_and_load_on_their_own(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_in_groups, 4, (tmp_path,))


def save_where_the_system_refuses(root: Path, how: str) -> tuple[type[BaseException], str]:
    """The system itself refuses on rank 1, or on all: a file may not grow, the user may not write, nobody may."""
    directory = root / "new"
    if dist.get_rank() == 0:
        directory.mkdir(exist_ok=True)
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    user = os.geteuid()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1 << 18), (0, dist.get_rank(), 3))}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if how == "too large" and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        if how == "not allowed" and dist.get_rank() == 1:
            os.seteuid(65534)
        if how == "read only":
            directory = Path("/proc/self/task")
        return told(lambda: dist_checkpointing.save(state, directory))
    finally:
        os.seteuid(user)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("how", "said"),
    [("too large", "File too large"), ("not allowed", "Permission denied"), ("read only", "/proc/self/task")],
)
def test_what_the_system_refuses_is_one_error_on_all_ranks(
    ranks: RankPool, tmp_path: Path, how: str, said: str
) -> None:
    if how == "not allowed" and os.geteuid() != 0:
        pytest.skip("needs root, to become another user on one rank")
    remesh.save({"w": torch.ones(4)}, tmp_path / "step-00000001")
    kind, text = same_on_all(ranks.run(save_where_the_system_refuses, 3, (tmp_path, how)))
    assert issubclass(kind, StorageError)
    assert said in text
    assert remesh.latest_complete(tmp_path) == tmp_path / "step-00000001"
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "new")


_SAVES: dict[str, Callable[[Path], object]] = {
    "plain": lambda folder: remesh.save({"w": torch.ones(9), "v": torch.ones(9)}, folder),
    "background": lambda folder: remesh.save(
        {"w": torch.ones(9), "v": torch.ones(9)}, folder, background=True
    ).result(),
    "sharded": lambda folder: dist_checkpointing.save({"w": part()}, folder),
    "sharded, one writer": lambda folder: dist_checkpointing.save({"w": held_by_all()}, folder),
    "zarr": lambda folder: dist_checkpointing.save({"w": part()}, folder, ("zarr", 1)),
    "dcp": lambda folder: dcp.save({"w": torch.ones(9), "v": torch.ones(9)}, storage_writer=DcpWriter(folder)),
}


def save_into_a_folder_of_ones_own(root: Path, way: str, is_made: bool) -> tuple[type[BaseException], str]:
    folder = root / f"of rank {dist.get_rank()}"
    if is_made:
        folder.mkdir()
    return told(lambda: _SAVES[way](folder))


_MADE_BY_CALLERS = ("sharded", "sharded, one writer", "zarr")  # as in Megatron


@pytest.mark.parametrize(
    ("way", "is_made"), [(way, made) for way in _SAVES for made in (True, False) if made or way not in _MADE_BY_CALLERS]
)
def test_ranks_with_different_folders_are_refused(ranks: RankPool, tmp_path: Path, way: str, is_made: bool) -> None:
    kind, text = same_on_all(ranks.run(save_into_a_folder_of_ones_own, 2, (tmp_path, way, is_made)))
    assert "the same path" in text or "correct the path" in text
    assert not list(tmp_path.rglob("metadata.json"))
    assert not list(tmp_path.rglob(".metadata"))
    assert issubclass(kind, StorageError) or way == "dcp"


_LOADS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "plain": remesh.load,
    "sharded": dist_checkpointing.load,
}


def load_what_this_rank_has_found(root: Path, way: str) -> tuple[type[BaseException], str]:
    mine = torch.zeros(2)
    state = {"w": mine if way == "plain" else ShardedTensor.from_rank_offsets("w", mine)}
    failed = told(lambda: _LOADS[way](state, root / f"step-0000000{1 + dist.get_rank() // 2}"))
    assert not mine.any(), "no failed load has changed a tensor"
    return failed


@pytest.mark.parametrize("way", list(_LOADS))
def test_ranks_that_have_found_two_checkpoints_do_not_mix_them(ranks: RankPool, tmp_path: Path, way: str) -> None:
    for step in (1, 2):
        remesh.save({"w": torch.full((2,), float(step))}, tmp_path / f"step-0000000{step}")
    kind, text = same_on_all(ranks.run(load_what_this_rank_has_found, 3, (tmp_path, way)))
    assert issubclass(kind, LayoutError)
    assert "step-00000001 and rank 2 loads" in text and "step-00000002, expected the same checkpoint" in text


def load_with_one_rank_wrong(root: Path) -> list[tuple[type[BaseException], str]]:
    is_wrong, state = dist.get_rank() == 1, {"w": torch.zeros(2)}
    return [
        told(lambda: remesh.load(state, None if is_wrong else root / "good")),  # type: ignore[arg-type]
        told(lambda: remesh.save(state, None if is_wrong else root / "new")),  # type: ignore[arg-type]
        told(lambda: remesh.load(state, root / "good", strict="no" if is_wrong else True)),  # type: ignore[arg-type]
    ]


def test_a_rank_without_a_path_leaves_no_other_waiting(ranks: RankPool, tmp_path: Path) -> None:
    remesh.save({"w": torch.ones(2)}, tmp_path / "good")
    for answers in zip(*ranks.run(load_with_one_rank_wrong, 3, (tmp_path,)), strict=True):
        kind, text = same_on_all(list(answers))
        assert kind is OptionError and "(raised on rank 1)" in text
    assert not (tmp_path / "new").exists()


class OtherZarr(ZarrSaveShardedStrategy):
    """A strategy of a program's own."""


def call_with_other_options(directory: Path) -> list[tuple[type[BaseException], str]]:
    """One rank saves, or loads, with another option: collectives that only some make would never end."""
    is_other, answers = dist.get_rank() == 1, []
    (directory / "saved").mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({"w": part()}, directory / "saved")
    (directory / "new").mkdir(exist_ok=True)
    default = get_default_save_sharded_strategy()
    for usual, other in [
        ({}, {"async_sharded_save": True}),
        ({}, {"verify_integrity": True}),
        ({"verify_integrity": True}, {}),
        ({}, {"validate_access_integrity": False}),
        ({}, {"sharded_strategy": ("zarr", 1)}),
        ({"sharded_strategy": ("zarr", 1)}, {"sharded_strategy": OtherZarr()}),
        ({}, {"sharded_strategy": FullyParallelSaveStrategyWrapper(default)}),
    ]:
        given: dict[str, Any] = other if is_other else usual
        answers.append(told(lambda given=given: dist_checkpointing.save({"w": part()}, directory / "new", **given)))  # type: ignore[misc]
    reader = get_default_load_sharded_strategy(directory / "saved")
    for usual, other in [
        ({}, {"strict": "return_all"}),
        ({"strict": "log_all"}, {"strict": "raise_all"}),
        ({}, {"verify_integrity": True}),
        ({}, {"validate_access_integrity": False}),
        ({}, {"sharded_strategy": FullyParallelLoadStrategyWrapper(reader)}),
    ]:
        given = other if is_other else usual
        answers.append(told(lambda given=given: dist_checkpointing.load({"w": part()}, directory / "saved", **given)))  # type: ignore[misc]
    dist_checkpointing.save({"w": part()}, directory / "new")
    return answers


def test_an_option_of_sharded_saves_and_loads_that_differs_on_one_rank_is_named(
    ranks: RankPool, tmp_path: Path
) -> None:
    answers = ranks.run(call_with_other_options, 3, (tmp_path,))
    names = ["async_sharded_save", *["verify_integrity"] * 2, "validate_access_integrity", *["sharded_strategy"] * 3]
    names += ["strict", "strict", "verify_integrity", "validate_access_integrity", "sharded_strategy"]
    for name, said in zip(names, zip(*answers, strict=True), strict=True):
        kind, text = same_on_all(list(said))
        assert kind is OptionError and f"option {name} is" in text and "on rank 0 and" in text, text


def _load_into_a_read_only_map(folder: Path) -> str:
    remesh.save({"v": torch.zeros(4), "w": torch.ones(4)}, folder / "c")
    state = {"v": torch.ones(4), "w": torch.ones(4)}
    if dist.get_rank() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.ones(4, np.float32).tofile(folder / "raw")
            state["w"] = torch.from_numpy(np.memmap(folder / "raw", np.float32, mode="r"))
    with pytest.raises(CheckpointMismatchError) as raised:
        remesh.load(state, folder / "c")
    assert state["v"].equal(torch.ones(4))
    return str(raised.value)


def test_a_read_only_map_as_a_target_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_load_into_a_read_only_map, 2, (tmp_path,))
    assert told[0] == told[1]
    assert "filling tensor 'w': its memory can only be read" in told[0]
