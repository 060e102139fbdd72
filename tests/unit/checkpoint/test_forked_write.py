"""A save from a fork writes what was there when it began, as a save from a copy does, and leaves no child behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remesh import dist_checkpointing
from remesh.checkpoint.storage.integrity import check_sha256_manifest, verify
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(400, 900, generator=generator),
        "turned": torch.randn(300, 500, generator=generator).t(),
        "half": torch.randn(500, 700, generator=generator).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        **{f"small{number}": torch.randn(10, 3, generator=generator) for number in range(40)},
    }


def state(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    sharded = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in values.items()}
    return {**sharded, "o": ShardedObject("o", {"a": [1]}, (1,), (0,)), "step": 3}


def begin(values: dict[str, torch.Tensor], directory: Path, **options: Any) -> Any:
    directory.mkdir()
    strategy = TorchDistSaveShardedStrategy(snapshots="fork")
    return dist_checkpointing.save(state(values), directory, strategy, async_sharded_save=True, **options)


def children() -> set[str]:
    """Processes that this one has started, dead ones included until they are waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = children()
    yield
    gc.collect()
    assert children() <= before


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    values, before = tensors(), tensors()
    request = begin(values, tmp_path / "c")
    for value in values.values():
        value.fill_(7)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    wanted = {name: torch.zeros_like(value) for name, value in before.items()}
    loaded = dist_checkpointing.load(state(wanted), tmp_path / "c")
    assert isinstance(loaded, dict)
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
    assert loaded["step"] == 3 and loaded["o"] == {"a": [1]}
    assert list(verify(tmp_path / "c"))


def test_the_file_is_that_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    begin(tensors(), tmp_path / "forked").execute_sync()
    (tmp_path / "plain").mkdir()
    dist_checkpointing.save(state(tensors()), tmp_path / "plain")
    names = ("__0_0.distcp", "common.pt")
    assert all((tmp_path / "forked" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes() for name in names)


def test_sums_are_computed_by_the_child(tmp_path: Path) -> None:
    begin(tensors(), tmp_path / "c", verify_integrity=True).execute_sync()
    check_sha256_manifest(tmp_path / "c")


def test_a_request_that_nobody_schedules_leaves_nothing(tmp_path: Path) -> None:
    request = begin(tensors(), tmp_path / "c")
    assert children()
    del request
    gc.collect()
    assert not (tmp_path / "c" / "__0_0.distcp").exists()


def test_an_error_of_the_child_is_raised(tmp_path: Path) -> None:
    request = begin(tensors(), tmp_path / "c")
    (tmp_path / "c" / "__0_0.distcp").mkdir()
    with pytest.raises(CheckpointingException, match="__0_0.distcp.*IsADirectoryError"):
        request.execute_sync()
    assert not (tmp_path / "c" / "metadata.json").exists()


def test_it_writes_to_file_systems_only(tmp_path: Path) -> None:
    strategy = TorchDistSaveShardedStrategy(snapshots="fork")
    url = f"memory://forked-{tmp_path.name}"
    with pytest.raises(CheckpointingException, match="found a URL"):
        dist_checkpointing.save(state(tensors()), url, strategy, async_sharded_save=True)
    with pytest.raises(CheckpointingException, match="'copy', 'guard' or 'fork'"):
        TorchDistSaveShardedStrategy(snapshots="spoon")
