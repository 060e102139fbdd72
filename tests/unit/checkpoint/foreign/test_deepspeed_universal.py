"""Checkpoints become universal ones of DeepSpeed. They are read here as DeepSpeed reads them, a file for each state.

DeepSpeed itself resumes from them in ``tests/hosts/test_deepspeed.py``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.cli import main
from tests.profiles import seeds
from tests.unit.checkpoint.foreign.hurt_files import lose, shorten
from tests.unit.checkpoint.foreign.zero_files import random_job, write_zero

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7,)}
KINDS = ("exp_avg", "exp_avg_sq")


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    moments = {
        name: {kind: torch.randn(shape, generator=generator) for kind in KINDS} | {"step": torch.tensor(3.0)}
        for name, shape in SHAPES.items()
    }
    return {
        "model": {**values, "head.weight": values["a.weight"].clone(), "running": torch.arange(4)},
        "shared": {"head.weight": "a.weight"},
        "optimizer": moments,
        "groups": [
            {"lr": 0.1, "weight_decay": 0.2, "capturable": False, "params": ["a.weight", "a.bias"]},
            {"lr": 0.1, "weight_decay": 0.0, "capturable": False, "params": ["b.weight"]},
        ],
        "scheduler": {"last_epoch": 3},
        "program": {"epoch": 2, "rng": torch.arange(5), "deep": {"er": torch.ones(2)}, "global_steps": 4},
    }


def _convert(state: dict[str, Any], folder: Path) -> Path:
    remesh.save(state, folder / "ours")
    return _back(folder)


def _back(folder: Path) -> Path:
    verb = ["ckpt", "convert", str(folder / "ours"), str(folder / "theirs"), "--to", "deepspeed-universal"]
    main(verb, standalone_mode=False)
    return folder / "theirs" / (folder / "theirs" / "latest_universal").read_text()


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_every_state_is_in_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _state()
    tag = _convert(state, tmp_path)
    assert tag.name == "global_step4_universal"
    for name in SHAPES:
        assert _read(tag / "zero" / name / "fp32.pt")["param"].equal(state["model"][name])
        for kind in KINDS:
            assert _read(tag / "zero" / name / f"{kind}.pt")["param"].equal(state["optimizer"][name][kind])
        assert _read(tag / "zero" / name / "step.pt").equal(torch.tensor(3.0))
    assert sorted(path.name for path in (tag / "zero").iterdir()) == sorted([*SHAPES, "optimizer_state.pt"])
    options = _read(tag / "zero" / "optimizer_state.pt")
    assert [group["weight_decay"] for group in options["param_groups"]] == [0.2, 0.0]
    # ZeRO 3 gives what it finds here to all groups: only what all of them have.
    assert options["optimizer_state_dict"] == {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "capturable": False, "params": [0]}],
    }
    for stem in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        told = _read(tag / f"{stem}_model_states.pt")
        assert told["buffers"].keys() == {"running"} and told["buffers"]["running"].equal(torch.arange(4))
        assert (told["epoch"], told["global_steps"], told["lr_scheduler"]) == (2, 4, {"last_epoch": 3})
        assert told["rng"].equal(torch.arange(5)) and told["mp_world_size"] == 1
    said = capsys.readouterr().out
    assert "client_state['buffers']" in said and "weight_decay" in said and "program.deep.er" in said


@pytest.mark.parametrize("seed", seeds(16, quick=6))
def test_any_job_of_zero_comes_back_bit_by_bit(tmp_path: Path, seed: int) -> None:
    """Scalars, empty tensors, groups of any number and second names, as ZeRO has cut them on up to five ranks."""
    job = random_job(random.Random(seed))
    values = write_zero(tmp_path / "zero", job)
    verb = ["ckpt", "convert", str(tmp_path / "zero"), str(tmp_path / "ours"), "--from", "deepspeed-zero"]
    main([*verb, "--to", "torch_dist"], standalone_mode=False)
    tag = _back(tmp_path)
    assert {path.name for path in (tag / "zero").iterdir()} == {*values["master"], "optimizer_state.pt"}
    files = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
    for kind, tensors in values.items():
        for name, expected in tensors.items():
            found = _read(tag / "zero" / name / files[kind])["param"]
            assert found.dtype == torch.float32 and found.equal(expected) and found.shape == expected.shape, name
    told = _read(tag / "zero" / "optimizer_state.pt")["param_groups"]
    assert [group["lr"] for group in told] == [(number + 1) / 10 for number in range(len(job.groups))]


@pytest.mark.parametrize("seed", seeds(12, quick=6))
def test_a_source_that_was_hurt_leaves_no_checkpoint_of_deepspeed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    remesh.save(_state(), tmp_path / "ours")
    chance.choice([shorten, lose])(chance.choice(sorted((tmp_path / "ours").glob("*.distcp"))), chance)
    with pytest.raises((CheckpointingException, click.ClickException)):
        _back(tmp_path)
    assert not any((tmp_path / "theirs").glob("*global_step*/*model_states.pt"))
    assert not (tmp_path / "theirs" / "latest_universal").exists()


def test_states_as_torch_has_them_become_the_same(tmp_path: Path) -> None:
    state = _state()
    groups = [{key: value for key, value in group.items() if key != "capturable"} for group in state.pop("groups")]
    state = {"model": state["model"], "optimizer": {"state": state["optimizer"], "param_groups": groups}}
    tag = _convert(state, tmp_path)
    found = _read(tag / "zero" / "b.weight" / "exp_avg.pt")["param"]
    assert tag.name == "global_step3_universal" and found.equal(state["optimizer"]["state"]["b.weight"]["exp_avg"])
    assert _read(tag / "zero" / "b.weight" / "step.pt") == 3  # a number, as optimizers of DeepSpeed count


def _forget(state: dict[str, Any]) -> None:
    del state["optimizer"]["b.weight"]["exp_avg"], state["model"]["a.bias"]


def _add(state: dict[str, Any]) -> None:
    state["optimizer"]["a.bias"]["max_exp_avg_sq"] = torch.ones(5)


def _reshape(state: dict[str, Any]) -> None:
    state["optimizer"]["a.bias"]["exp_avg"] = torch.ones(6)


def _shift(state: dict[str, Any]) -> None:
    state["optimizer"]["a.bias"]["step"] = torch.tensor(2.0)


def _number(state: dict[str, Any]) -> None:
    state["groups"] = [{"params": [0, 1, 2]}]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_forget, r"2 of 12 tensors missing(.|\n)*model.a.bias\n  optimizer.b.weight.exp_avg$"),
        (_add, r"1 states of the optimizer that no universal checkpoint has(.|\n)*a.bias.max_exp_avg_sq"),
        (_reshape, r"moments of 'a.bias' as .*\(6,\).*expected \(5,\)"),
        (_shift, r"parameters at steps \[2.0, 3.0\]"),
        (_number, "no groups of an optimizer that name their parameters"),
    ],
)
def test_what_deepspeed_would_leave_behind_or_miss_is_refused(tmp_path: Path, change: Any, told: str) -> None:
    state = _state()
    change(state)
    with pytest.raises((CheckpointingException, click.ClickException), match=told):
        _convert(state, tmp_path)
    assert not (tmp_path / "theirs").exists()


def test_a_tag_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    tag = _convert(_state(), tmp_path)
    before = (tag / "zero" / "a.bias" / "fp32.pt").stat().st_mtime_ns
    verb = ["ckpt", "convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "deepspeed-universal"]
    with pytest.raises((CheckpointingException, click.ClickException), match="is there; give a new folder"):
        main(verb, standalone_mode=False)
    assert (tag / "zero" / "a.bias" / "fp32.pt").stat().st_mtime_ns == before
