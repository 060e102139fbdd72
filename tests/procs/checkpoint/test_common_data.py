"""Plain values that are not the same on all ranks: keys of some ranks are kept, differences are told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.run import common_data
from remesh.testbed.pool import RankPool


@contextmanager
def _warnings() -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    common_data._warned.clear()
    common_data.logger.addHandler(handler)
    try:
        yield told
    finally:
        common_data.logger.removeHandler(handler)


def _generator_state(seed: int) -> Any:
    """A tuple with an array in it, as programs save it."""
    return np.random.RandomState(seed).get_state()


def save_and_load_unlike(root: Path) -> tuple[list[str], dict[str, Any]]:
    """As the stages of a pipeline and loaders of each rank have plain values; the last rank asks for those of all."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    state = {
        "optim": {f"layers.{rank}.lr": rank / 10, "eps": float("nan")},
        "loader": {f"dp_rank_{rank}": bytes([rank]), "world_size": num_ranks},
        "groups": [{"tag": "same", f"of_{rank}": _generator_state(7)}],
        "random": _generator_state(rank),
        "loss": [0.5, rank],
    }
    with _warnings() as told:
        for number, background in enumerate((False, True)):
            remesh.save(state, root / str(number), background=background).result()
    asked = {"optim": {f"layers.{other}.lr": None for other in range(num_ranks)}}
    return told, remesh.load(asked, root / "1")


def test_keys_that_some_ranks_have_are_kept_and_values_that_differ_are_told_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    for rank, (told, state) in enumerate(ranks.run(save_and_load_unlike, 3, (tmp_path,))):
        assert [state["optim"][f"layers.{other}.lr"] for other in range(3)] == [0.0, 0.1, 0.2]
        assert state["loader"] == {"dp_rank_0": b"\0", "dp_rank_1": b"\1", "dp_rank_2": b"\2", "world_size": 3}
        assert list(state["groups"][0]) == ["tag", "of_0", "of_1", "of_2"]
        assert state["loss"] == [0.5, 0] and np.array_equal(state["random"][1], _generator_state(0)[1])
        if rank == 0:
            (line,) = told
            assert "2 plain values differ between ranks, 'loss.1', 'random', expected equal ones" in line
        else:
            assert told == []


def save_what_one_rank_cannot(root: Path) -> None:
    remesh.save({"w": torch.ones(2), "hook": None if dist.get_rank() == 0 else print}, root / "refused")


def test_a_value_that_cannot_be_stored_is_refused_on_whatever_rank(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"saving checkpoint .*refused: .*builtins\.print.*raised on rank 1"):
        ranks.run(save_what_one_rank_cannot, 2, (tmp_path,))
    assert not (tmp_path / "refused").exists()


def save_generators(root: Path) -> list[str]:
    """What every rank has of its own in the common data of a sharded state."""
    with _warnings() as told:
        dist_checkpointing.save({"random": _generator_state(dist.get_rank())}, root)
    return told


def test_arrays_in_tuples_that_differ_are_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(save_generators, 2, (tmp_path,))
    assert first == []
    assert len(second) == 1 and "Mismatched keys: [(('random',), <class 'tuple'>, <class 'tuple'>)]" in second[0]


def _save_other_kinds(folder: Path) -> list[str]:
    rank, tensor = dist.get_rank(), torch.ones(3)
    told = []
    for number, (first, second) in enumerate(
        [
            ({"l": [tensor, 5]}, {"l": [5, tensor]}),
            ({"a": 5}, {"a": tensor}),
            ({"a": {"b": tensor}}, {"a": "text"}),
            ({"all": tensor, "a": 5}, {"all": tensor, "a": {0: {"b": tensor}}}),
            ({"model": {}, "step": 3}, {"model": {"w": tensor}, "step": 3}),
        ]
    ):
        for background in (False, True):
            path = folder / f"{number} {background}"
            try:
                remesh.save((first, second)[rank], path, background=background).result()
                remesh.load(second, path)
                told.append("saved")
            except CheckpointMismatchError as raised:
                assert not path.exists() or not any(path.iterdir())
                told.append(str(raised))
    return told


def test_a_value_of_one_rank_under_the_name_of_a_tensor_of_another_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_save_other_kinds, 2, (tmp_path,))
    assert told[0] == told[1]
    assert all("under which there is a tensor as well" in one for one in told[0][:-2]), told[0]
    assert told[0][-2:] == ["saved", "saved"]
