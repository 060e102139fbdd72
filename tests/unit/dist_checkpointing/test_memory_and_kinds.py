"""States of every kind of memory and value that others' tests bring are carried, or refused by this room's errors."""

from __future__ import annotations

import copy
import io
import pathlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.dict_utils import diff
from remesh.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from remesh.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from remesh.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from remesh.dist_checkpointing.validation import StrictHandling


def whole(key: str, tensor: torch.Tensor | None, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize(("shape", "saved", "loaded"), [((1,), (3,), (7,)), ((1, 1), (5, 3), (2, 9)), ((), (), ())])
def test_a_tensor_of_one_element_may_have_any_stride(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    dist_checkpointing.save({"w": whole("w", torch.arange(9).to(dtype)[4:].as_strided(shape, saved))}, tmp_path)
    memory = torch.zeros(9, dtype=dtype)
    result = dist_checkpointing.load({"w": whole("w", memory.as_strided(shape, loaded))}, tmp_path)
    assert result["w"].flatten().tolist() == [4] and memory.tolist() == [4] + [0] * 8


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (1, 1)])
def test_an_empty_slice_of_another_grid_wants_nothing(tmp_path: Path, shape: tuple[int, int]) -> None:
    make = ShardedTensor.from_rank_offsets_flat
    dist_checkpointing.save({"w": make("w", torch.arange(6.0), (2, 3), flattened_range=slice(0, 6))}, tmp_path)
    offsets = [(axis, 0, whole // part) for axis, (whole, part) in enumerate(zip((2, 3), shape, strict=True))]
    num = shape[0] * shape[1]
    asked = {"w": make("w", torch.empty(0), shape, *offsets, flattened_range=slice(num, num))}
    loaded = dist_checkpointing.load(asked, tmp_path, validate_access_integrity=False)
    assert loaded["w"].shape == (0,)


def test_buffers_and_paths_come_back(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"extra state")
    buffer.seek(3)
    state = {
        "extra": ShardedObject("extra", buffer, (1,), (0,)),
        "none": ShardedObject("none", None, (1,), (0,)),
        "path": pathlib.Path("a/b"),
    }
    dist_checkpointing.save(state, tmp_path)
    loaded = dist_checkpointing.load(
        {name: ShardedObject(name, None, (1,), (0,)) for name in ("extra", "none")}, tmp_path
    )
    assert loaded["extra"].getvalue() == b"extra state" and loaded["extra"].tell() == 3
    assert loaded["path"] == pathlib.Path("a/b") and loaded["none"] is None


@pytest.mark.parametrize("empty", [b"", io.BytesIO()], ids=["bytes", "buffer"])
def test_bytes_that_are_none_come_back(tmp_path: Path, empty: Any) -> None:
    dist_checkpointing.save({"o": ShardedObject("o", empty, (1,), (0,)), "common": empty}, tmp_path)
    loaded = dist_checkpointing.load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)
    for found in (loaded["o"], loaded["common"]):
        assert type(found) is type(empty) and (found if empty == b"" else found.getvalue()) == b""


@pytest.mark.parametrize("in_background", [False, True])
def test_strategies_save_and_load_by_themselves(tmp_path: Path, in_background: bool) -> None:
    save, load = TorchDistSaveShardedStrategy(), TorchDistLoadShardedStrategy()
    state = {"w": whole("w", torch.arange(3.0)), "o": ShardedObject("o", "kept", (1,), (0,))}
    if in_background:
        save.async_save(state, tmp_path).execute_sync()
    else:
        save.save(state, tmp_path)
    asked = {"w": whole("w", torch.zeros(3)), "o": ShardedObject("o", None, (1,), (0,))}
    loaded = load.load(asked, tmp_path)
    assert loaded["w"].tolist() == [0, 1, 2] and loaded["o"] == "kept"
    assert load.load_sharded_metadata(tmp_path).keys() == {"w", "o/shard_0_1"}
    native = {"w": torch.zeros(3)}
    dcp.FileSystemReader(tmp_path)
    dcp.state_dict_loader._load_state_dict(native, dcp.FileSystemReader(tmp_path), no_dist=True)
    assert native["w"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointingException, match="already holds"):
        save.save(state, tmp_path)


def test_strategies_can_be_copied(tmp_path: Path) -> None:
    class Own(TorchDistSaveShardedStrategy):
        pass

    one = Own(keep_only_main_replica=False, max_staged_bytes=1 << 20, separation_hint="w")
    one.notes = ["mine"]  # type: ignore[attr-defined]
    one.save({"w": whole("w", torch.ones(3))}, tmp_path / "one")
    other = copy.deepcopy(FullyParallelSaveStrategyWrapper(one)).base_strategy
    assert type(other) is Own and other is not one
    assert (other.keep_only_main_replica, other.separation_hint, other.notes) == (False, "w", ["mine"])  # type: ignore[attr-defined]
    assert other.notes is not one.notes  # type: ignore[attr-defined]
    assert other._staging is not one._staging
    other.save({"w": whole("w", torch.ones(3))}, tmp_path / "other")
    copy.deepcopy(TorchDistLoadShardedStrategy(cache_metadata=True))


def test_leaves_that_compare_equal_do_not_differ() -> None:
    left = {"a": torch.ones(2), "b": 1, "c": torch.ones(2), "d": torch.ones(2), "e": True, "f": torch.ones(1)}
    right = {"a": torch.ones(2, dtype=torch.int32), "b": 1.0, "c": torch.zeros(2), "d": torch.ones(3)}
    right |= {"e": torch.ones(2), "f": 1}
    assert [path for path, *_ in diff(left, right)[2]] == [("c",), ("d",), ("e",)]


@pytest.mark.parametrize(
    "state",
    [
        [1],
        "text",
        {"w": whole("w", torch.ones(3, device="meta"))},
        {"w": whole("w", torch.eye(3).to_sparse())},
    ],
)
def test_what_cannot_be_saved_is_an_error_of_this_room(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointingException, match=f"saving checkpoint {tmp_path}"):
        dist_checkpointing.save(state, tmp_path)


@pytest.mark.parametrize(
    "asked", [torch.ones(4, 4, device="meta"), torch.zeros(1, 4).expand(4, 4), torch.eye(4).to_sparse()]
)
def test_what_cannot_be_filled_is_an_error_of_this_room(tmp_path: Path, asked: torch.Tensor) -> None:
    dist_checkpointing.save({"w": whole("w", torch.ones(4, 4))}, tmp_path)
    with pytest.raises(CheckpointMismatchError, match="tensor 'w'"):
        dist_checkpointing.load({"w": whole("w", asked)}, tmp_path)


def held_in_memory() -> MCoreTensorAwareStateDict:
    state = {"a": whole("a", torch.ones(2)), "b": whole("b", torch.ones(3)), "c": 1}
    return MCoreTensorAwareStateDict.from_state_dict(state, algo="atomic")[0]


@pytest.mark.parametrize("strict", ["raise_unexpected", "raise_all"])
def test_a_state_in_memory_raises_for_keys_as_strict_says(strict: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="(?s)Unexpected keys.*'new'"):
        held_in_memory().to_state_dict({"a": whole("a", torch.zeros(2))} | _new(), strict=strict)


def test_a_state_in_memory_returns_keys_as_strict_says() -> None:
    asked = {"a": whole("a", torch.zeros(2))} | _new()
    result, missing, unexpected = held_in_memory().to_state_dict(asked, strict="return_all")
    assert (missing, unexpected) == ({"b"}, {"new"})
    assert result.keys() == {"a", "c"} and result["a"].tolist() == [1, 1]
    with pytest.raises(CheckpointMismatchError, match="(?s)missing.*'b'"):
        held_in_memory().to_state_dict({"a": whole("a", torch.zeros(2))}, strict="raise_all")


@pytest.mark.parametrize("strict", StrictHandling)
@pytest.mark.parametrize("validates", [True, False])
def test_a_state_in_memory_returns_missing_keys_in_two_modes_only(strict: StrictHandling, validates: bool) -> None:
    """As Megatron's own tests expect: a mode that does not look at all ranks knows of no missing key."""
    if strict is StrictHandling.RAISE_ALL:
        return
    result, missing, unexpected = held_in_memory().to_state_dict(
        {"a": whole("a", torch.zeros(2))},
        validate_access_integrity=validates,
        strict=strict,
        return_mismatch_keys=True,
    )
    returned = strict in (StrictHandling.LOG_ALL, StrictHandling.RETURN_ALL)
    assert (missing, unexpected) == ({"b"} if returned else set(), set())
    assert result["a"].tolist() == [1, 1]


def _new() -> dict[str, Any]:
    return {"new": whole("new", torch.zeros(2))}
