"""What cannot be moved, or with whom nobody can talk: an error of ours on all ranks, and nobody is left waiting."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import remesh
from remesh.foundation.errors import ConfigError, Error
from remesh.resharding.refit import Refit
from remesh.testbed.pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def _whole() -> torch.Tensor:
    return torch.ones(4)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _lazy() -> torch.Tensor:
    return torch.nn.LazyLinear(3).weight


def _error_of(call: Callable[[], Any]) -> tuple[bool, str]:
    try:
        call()
    except Exception as raised:
        return isinstance(raised, Error), str(raised)
    return False, "nothing was raised"


_TENSORS = {"nested": (_nested, "is nested"), "lazy": (_lazy, "is not initialised yet")}


def _move_what_is_no_tensor_of_memory(kind: str) -> list[tuple[bool, str]]:
    make, _ = _TENSORS[kind]
    bad = make if dist.get_rank() == 1 else _whole
    return [
        _error_of(lambda: remesh.reshard({"w": bad()}, {"w": _whole()})),
        _error_of(lambda: remesh.reshard({"w": _whole()}, {"w": bad()})),
        _error_of(lambda: Refit({"w": make()})),
    ]


@pytest.mark.parametrize("kind", _TENSORS)
def test_a_tensor_without_a_shape_or_memory_is_named(ranks: RankPool, kind: str) -> None:
    for of_rank in ranks.run(_move_what_is_no_tensor_of_memory, 2, (kind,)):
        for is_ours, told in of_rank:
            assert is_ours and _TENSORS[kind][1] in told and "'w'" in told


def _chunks_of(num_bytes: int) -> tuple[bool, str]:
    options: Any = {"chunk_bytes": num_bytes} if dist.get_rank() else {}
    return _error_of(lambda: remesh.reshard({"w": _whole()}, {"w": _whole()}, **options))


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 63, 1 << 70])
def test_a_number_of_bytes_that_no_memory_has_is_named(ranks: RankPool, num_bytes: int) -> None:
    assert all(is_ours and "chunk_bytes" in told for is_ours, told in ranks.run(_chunks_of, 2, (num_bytes,)))


def _calls(group: Any, folder: Path) -> list[tuple[bool, str]]:
    return [
        _error_of(lambda: remesh.save({"w": _whole()}, folder / "c", group=group)),
        _error_of(lambda: remesh.load({"w": _whole()}, folder / "c", group=group)),
        _error_of(lambda: remesh.Checkpoints(folder, group=group).latest()),
        _error_of(lambda: remesh.reshard({"w": _whole()}, {"w": _whole()}, group=group)),
        _error_of(lambda: Refit({"w": _whole()}, group=group).push({"w": _whole()}, 1)),
    ]


def _in_a_destroyed_group(folder: Path) -> list[tuple[bool, str]]:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return _calls(group, folder)


def test_a_group_that_was_destroyed_is_told(ranks: RankPool, tmp_path: Path) -> None:
    for of_rank in ranks.run(_in_a_destroyed_group, 2, (tmp_path,)):
        assert all(is_ours and "the group was destroyed" in told for is_ours, told in of_rank), of_rank


def test_a_backend_that_carries_nothing_is_told(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for is_ours, told in _calls(None, tmp_path):
            assert is_ours and "the backend of the group is 'fake'" in told
        with pytest.raises(ConfigError, match="'fake'"):
            remesh.save({"w": _whole()}, tmp_path / "c")
    finally:
        dist.destroy_process_group()


def _take_into_a_read_only_map(path: str) -> tuple[bool, str]:
    """On rank 1; the other one takes into memory that may be written."""
    take = _whole().zero_()
    if dist.get_rank() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it cannot be written
            take = torch.from_numpy(np.memmap(path, np.float32, mode="r"))
    told = _error_of(lambda: remesh.reshard({"w": _whole()}, {"w": take}))
    assert take.eq(0).all()
    return told


def test_a_read_only_map_is_refused_on_all_ranks_and_nothing_is_written(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(16))
    for is_ours, told in ranks.run(_take_into_a_read_only_map, 2, (str(tmp_path / "raw"),)):
        assert is_ours and "'w': on rank 1 its memory can only be read" in told
