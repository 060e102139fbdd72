"""All ranks together must fill everything exactly once; each way to fail is told with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedObject, ShardedTensor, validation
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.mapping import ShardedBase
from remesh.dist_checkpointing.validation import (
    StrictHandling,
    decide_on_mismatch,
    find_mismatch,
    parse_strict_flag,
    validate_sharding_integrity,
)


def part(rank: int, num_parts: int, size: int = 4, **fields: object) -> ShardedTensor:
    dtype = fields.pop("dtype", torch.float32)
    data = torch.zeros(size, dtype=dtype)  # type: ignore[call-overload]
    return ShardedTensor.from_rank_offsets("w", data, (0, rank, num_parts), **fields)  # type: ignore[arg-type]


def box(start: int, stop: int, size: int = 10) -> ShardedTensor:
    return ShardedTensor("w", None, torch.float32, (stop - start,), (size,), (start,), None)


def element(at: int, num: int, **fields: int) -> ShardedObject:
    return ShardedObject("rng", None, (num,), (at,), **fields)


@pytest.mark.parametrize(
    "ranks",
    [
        [[part(0, 2)], [part(1, 2)]],
        [[part(0, 2), part(1, 2)], []],
        [[part(0, 1)], [part(0, 1, replica_id=1)], [part(0, 1, replica_id=(0, 1))]],
        [[box(0, 3), box(7, 10)], [box(3, 7)]],
        [[box(0, 0), box(0, 10)], [box(10, 10)]],
        [[box(0, 0, 0)], [box(0, 0, 0)]],
        [[element(0, 2)], [element(1, 2), element(0, 2, replica_id=1)]],
        [[], []],
    ],
)
def test_what_fits_together_passes(ranks: list[list[ShardedBase]]) -> None:
    validate_sharding_integrity(ranks)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[part(0, 2)], []], "[4:8]"),
        ([[part(0, 1)], [part(0, 1)]], "belongs to 2 main replicas, on ranks [0, 1]"),
        ([[part(0, 1, replica_id=1)], []], "'w'"),
        ([[part(0, 2)], [part(1, 2, dtype=torch.int8)]], "dtype of 'w' is torch.float32 on rank 0 but torch.int8"),
        ([[part(0, 2)], [part(1, 2, size=5)]], "global_shape of 'w' is (8,) on rank 0 but (10,) on rank 1"),
        ([[box(0, 6)], [box(4, 10)]], "[4:10]"),
        ([[box(0, 6)], [box(6, 12)]], "[6:12]"),
        ([[box(0, 6)], [part(0, 1, size=10)]], "has_regular_grid of 'w'"),
        ([[element(0, 2)], [element(0, 2)]], "Duplicate ShardedObject keys: ['rng/shard_0_2']"),
        ([[element(0, 3)], [element(1, 3)]], "1 ShardedObject are missing."),
        ([[element(0, 1)], [element(0, 2)]], "global_shape of object 'rng'"),
        ([[ShardedObject("w", None, (1,), (0,))], [part(0, 1)]], "names both a tensor and an object"),
    ],
)
def test_what_does_not_fit_is_told(ranks: list[list[ShardedBase]], said: str) -> None:
    with pytest.raises(CheckpointingException, match="Invalid sharding pattern validation") as caught:
        validate_sharding_integrity(ranks)
    assert said in str(caught.value)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(CheckpointingException, match="'w'.*'rng'"):
        validate_sharding_integrity([[part(0, 2), element(0, 2)]])


def test_strict_modes_have_the_known_names() -> None:
    assert parse_strict_flag("raise_all") is StrictHandling.RAISE_ALL
    assert parse_strict_flag(StrictHandling.LOG_ALL) is StrictHandling.LOG_ALL
    with pytest.raises(ValueError, match="Invalid strict flag: 'sometimes'"):
        parse_strict_flag("sometimes")


@pytest.mark.parametrize("strict", StrictHandling)
def test_each_mode_looks_at_what_its_name_says(strict: StrictHandling) -> None:
    """Megatron's table: which keys come back of a request that differs both ways."""
    found = find_mismatch(strict, {"a", "old"}, {"a", "new"}, {"a", "new", "novel"})
    looks_at_all = strict.value in ("log_all", "raise_all", "return_all")
    says_nothing = strict.value in ("assume_ok_unexpected", "ignore_all")
    assert found.missing == ({"old"} if looks_at_all else set())
    assert found.unexpected == (set() if says_nothing else {"new"})
    assert found.absent == (set() if strict.value == "assume_ok_unexpected" else {"new"})
    assert found.reported == ({"new", "novel"} if strict.value == "raise_all" else found.unexpected)


def test_each_mode_decides_on_its_own() -> None:
    assert decide_on_mismatch(StrictHandling.RAISE_ALL, set(), set()) is None
    assert decide_on_mismatch(StrictHandling.RETURN_ALL, {"a"}, {"b"}) is None
    logged = decide_on_mismatch(StrictHandling.LOG_ALL, {"a"}, {"b"})
    assert logged is not None
    assert "Missing keys (for all ranks): {'a'}" in logged
    assert "Unexpected keys (for this rank): {'b'}" in logged
    with pytest.raises(CheckpointingException, match=r"Unexpected keys \(for this rank\): {'b'}"):
        decide_on_mismatch(StrictHandling.RAISE_UNEXPECTED, set(), {"b"})
    with pytest.raises(CheckpointingException, match=r"Unexpected keys \(for all ranks\): {'b'}"):
        decide_on_mismatch(StrictHandling.RAISE_ALL, set(), {"b"})


def test_the_error_of_all_ranks_tells_the_unexpected_keys_of_all() -> None:
    mine, theirs, stored = [part(0, 1)], [element(0, 1)], {"w": part(0, 1)}
    everywhere = [mine, theirs]  # this rank asks for nothing that is not there
    with pytest.raises(CheckpointingException, match=r"Unexpected keys \(for all ranks\): {'rng'}"):
        validation.validate_integrity_and_strict_load(
            {"w": mine[0]}, StrictHandling.RAISE_ALL, False, mine, everywhere, stored
        )
    answer = validation.validate_integrity_and_strict_load(
        {"w": mine[0]}, StrictHandling.RETURN_ALL, False, mine, everywhere, stored
    )
    assert answer[1:] == (set(), set()), "what is returned is this rank's own"


def test_requests_are_made_strict_from_gathered_metadata(caplog: pytest.LogCaptureFixture) -> None:
    request = {"w": part(0, 1), "l": [element(0, 1)], "new": box(0, 10)}
    request["new"].key = "new"
    local, everywhere = validation.determine_global_metadata(request)
    assert [one.data for one in local] == [None, None, None]
    stored = {"w": part(0, 1), "rng/shard_0_1": element(0, 1), "old": box(0, 10)}
    stored["old"].key = "old"
    kept, missing, unexpected = validation.validate_integrity_and_strict_load(
        request, StrictHandling.RETURN_ALL, True, local, everywhere, stored
    )
    assert (set(kept), missing, unexpected) == ({"w", "l"}, {"old"}, {"new"})
    with pytest.raises(ValueError, match="give local_metadata"):
        validation.validate_integrity_and_strict_load(request, StrictHandling.RAISE_ALL, False)
    with pytest.raises(CheckpointingException, match="Missing keys"):
        validation.maybe_report_missing_and_unexpected_keys({"a"}, set())
    validation.maybe_report_missing_and_unexpected_keys({"a"}, set(), raise_error=False)
    assert "Missing keys" in caplog.text


def test_a_checkpoint_names_the_strategies_that_read_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="does not exist"):
        validation.verify_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
        validation.verify_checkpoint(tmp_path)
    dist_checkpointing.save({"w": part(0, 1)}, tmp_path)
    assert validation.verify_checkpoint(str(tmp_path)).sharded_backend == "torch_dist"
    sharded, common = validation.verify_checkpoint_and_load_strategy(tmp_path)
    assert sharded.can_handle_sharded_objects
    assert common.load_common(tmp_path) == {}
    with pytest.raises(CheckpointingException, match="Cannot find a default strategy for: .*'tape'"):
        validation.verify_checkpoint_and_load_strategy(tmp_path, ("tape", 1))
