"""Checkpoints of DeepSpeed ZeRO become ours. DeepSpeed's own are read in ``tests/hosts``."""

from __future__ import annotations

import enum
import random
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.foreign.deepspeed import read_zero
from remesh.cli import main
from tests.unit.checkpoint.foreign.hurt_files import flip, lose, shorten
from tests.unit.checkpoint.foreign.zero_files import KINDS, TAG, Job, Values, random_job, write_zero


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parameters_and_moments_come_out_bit_by_bit(tmp_path: Path, stage: int, num_ranks: int) -> None:
    values = write_zero(tmp_path, Job(stage, num_ranks))
    state = read_zero(tmp_path)
    for name, expected in values["master"].items():
        assert state["model"][name].equal(expected), name
        for kind in KINDS[1:]:
            assert state["optimizer"][name][kind].equal(values[kind][name]), (name, kind)
        assert state["optimizer"][name]["step"] == 3
    assert state["model"]["head.weight"].equal(values["master"]["a.weight"])
    assert state["model"]["norm.running"].equal(torch.ones(2, dtype=torch.bfloat16))
    assert state["groups"] == [{"lr": 0.1, "params": ["a.weight", "a.bias"]}, {"lr": 0.2, "params": ["b.weight"]}]
    assert state["scheduler"] == {"last_epoch": 3} and state["program"] == {"epoch": 2}


def _check(state: dict[str, Any], job: Job, values: Values) -> None:
    for name, expected in values["master"].items():
        assert state["model"][name].equal(expected), name
        for kind in KINDS[1:]:
            assert state["optimizer"][name][kind].equal(values[kind][name]), (name, kind)
    assert state["shared"] == job.shared
    assert all(state["model"][name].equal(values["master"][other]) for name, other in job.shared.items())


@pytest.mark.parametrize("seed", range(40))
def test_whole_tensors_come_out_of_any_job(tmp_path: Path, seed: int) -> None:
    job = random_job(random.Random(seed))
    values = write_zero(tmp_path, job)
    _check(read_zero(tmp_path), job, values)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_that_was_written_by_its_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """As Python 3.11.2 does."""
    monkeypatch.setattr(enum.IntEnum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    job = Job(stage, 2)
    values = write_zero(tmp_path, job)
    _check(read_zero(tmp_path), job, values)


def _add_parameter(path: Path, chance: random.Random) -> None:
    held = torch.load(path, weights_only=False)
    chance.choice(held["param_shapes"])["new.weight"] = torch.Size((chance.randint(1, 3),))
    torch.save(held, path)


def _add_second_name(path: Path, chance: random.Random) -> None:
    held = torch.load(path, weights_only=False)
    held["shared_params"] = held["shared_params"] | {"second.weight": "nobody.weight"}
    torch.save(held, path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        ("*optim_states.pt", shorten),
        ("*optim_states.pt", flip),
        ("*optim_states.pt", lose),
        ("*mp_rank_00_model_states.pt", shorten),
        ("*mp_rank_00_model_states.pt", _add_parameter),
        ("*mp_rank_00_model_states.pt", _add_second_name),
    ],
)
def test_what_was_hurt_is_refused_or_read_as_it_was(tmp_path: Path, pattern: str, change: Any, seed: int) -> None:
    chance = random.Random(seed)
    job = Job(chance.choice([1, 2, 3]), chance.randint(2, 5))
    values = write_zero(tmp_path, job)
    change(chance.choice(sorted((tmp_path / TAG).glob(pattern))), chance)
    try:
        state = read_zero(tmp_path)
    except CheckpointingException:
        return
    _check(state, job, values)


def test_groups_of_several_vectors_keep_all_their_parameters(tmp_path: Path) -> None:
    write_zero(tmp_path, Job(3, 2))
    for path in tmp_path.rglob("*optim_states.pt"):
        held = torch.load(path, weights_only=False)
        held["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"] = [{"lr": 0.3, "params": [0, 1]}]
        torch.save(held, path)
    assert read_zero(tmp_path)["groups"] == [{"lr": 0.3, "params": ["a.weight", "a.bias", "b.weight"]}]
    held["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"] = [{"lr": 0.3, "params": [0]}]
    for path in tmp_path.rglob("*optim_states.pt"):
        torch.save(held, path)
    with pytest.raises(CheckpointingException, match=r"groups of the vectors \[0\], expected each of 2 once"):
        read_zero(tmp_path)


def test_the_verb_makes_a_checkpoint_of_ours(tmp_path: Path) -> None:
    values = write_zero(tmp_path / "ds", Job(2, 2))
    verb = ["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "c"), "--from", "deepspeed-zero", "--to"]
    main([*verb, "torch_dist"], standalone_mode=False)
    loaded = remesh.load({"model": {"a.weight": torch.zeros(5, 3)}}, tmp_path / "c")
    assert loaded["model"]["a.weight"].equal(values["master"]["a.weight"]) and loaded["program"] == {"epoch": 2}
    with pytest.raises(click.ClickException, match="--to zarr"):
        main([*verb, "zarr"], standalone_mode=False)


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    write_zero(tmp_path, Job(2, 3))
    next(tmp_path.rglob("*rank_1_*optim*")).unlink()
    with pytest.raises(CheckpointingException, match="2 files of optimizer states, expected one of each of 3 ranks"):
        read_zero(tmp_path)


class _Strange:
    """A class that is not DeepSpeed's."""


def test_a_class_that_is_not_deepspeeds_is_refused(tmp_path: Path) -> None:
    write_zero(tmp_path, Job(2, 1))
    torch.save({"module": _Strange()}, next(tmp_path.rglob("*model_states.pt")))
    with pytest.raises(CheckpointingException, match="do not load it"):
        read_zero(tmp_path)


def test_partitions_that_do_not_fit_the_shapes_are_refused(tmp_path: Path) -> None:
    write_zero(tmp_path, Job(2, 2))
    path = next(tmp_path.rglob("*model_states.pt"))
    path.rename(path.with_name("old"))
    model = {"module": {}, "param_shapes": [{"a": torch.Size((2,))}, {"b": torch.Size((7,))}]}
    torch.save(model, path)
    with pytest.raises(CheckpointingException, match=r"group 0 has 20 elements, expected 2"):
        read_zero(tmp_path)


def test_a_model_that_is_cut_itself_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    write_zero(tmp_path, Job(1, 1))
    path = next(tmp_path.rglob("*optim_states.pt"))
    path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    with pytest.raises(CheckpointingException, match="data parallelism alone"):
        read_zero(tmp_path)
    with pytest.raises(CheckpointingException, match="no folder"):
        read_zero(tmp_path / "missing")
