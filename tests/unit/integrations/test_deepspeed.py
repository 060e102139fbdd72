"""Checkpoints of DeepSpeed ZeRO become ours. The files are made by a writer of our own, by DeepSpeed's rules."""

from __future__ import annotations

import enum
import math
import sys
import types
from pathlib import Path

import click
import pytest
import torch

import remesh
from remesh.checkpoint.errors import CheckpointingException
from remesh.cli import main
from remesh.integrations.deepspeed import read_zero

SHAPES = [{"a.weight": (5, 3), "a.bias": (5,)}, {"b.weight": (7,)}]
"""Of two groups; no size is a multiple of the ranks."""
KINDS = ("master", "exp_avg", "exp_avg_sq")


def _values() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return {
        kind: {name: torch.randn(shape, generator=generator) for group in SHAPES for name, shape in group.items()}
        for kind in KINDS
    }


def _partitions(values: dict[str, torch.Tensor], stage: int, num_ranks: int) -> list[list[torch.Tensor]]:
    """Rank -> group -> flat vector."""
    if stage == 3:
        parts: list[list[torch.Tensor]] = []
        for rank in range(num_ranks):
            of_rank = []
            for group in SHAPES:
                cut = []
                for name in group:
                    length = math.ceil(values[name].numel() / num_ranks)
                    padded = torch.zeros(length * num_ranks)
                    padded[: values[name].numel()] = values[name].reshape(-1)
                    cut.append(padded[rank * length : (rank + 1) * length])
                of_rank.append(torch.cat(cut))
            parts.append(of_rank)
        return parts
    cut_groups = []
    for group in SHAPES:
        vector = torch.cat([values[name].reshape(-1) for name in group])
        align = 2 * num_ranks
        padded = torch.zeros(math.ceil(len(vector) / align) * align)
        padded[: len(vector)] = vector
        cut_groups.append(padded.chunk(num_ranks))
    return [[group[rank] for group in cut_groups] for rank in range(num_ranks)]


def _own_class(name: str) -> type:
    """A class of DeepSpeed, which is not installed here."""
    module = sys.modules.setdefault("deepspeed.stand_in", types.ModuleType("deepspeed.stand_in"))
    made = type(name, (), {"__module__": "deepspeed.stand_in"})
    setattr(module, name, made)
    return made


def _stage_enum() -> type[enum.IntEnum]:
    """As DeepSpeed tells its stages: by members of an enumeration of its own."""
    name, module = "ZeroStageEnum", sys.modules.setdefault("deepspeed.stand_in", types.ModuleType("deepspeed.stand_in"))
    made = enum.IntEnum(name, {"one": 1, "two": 2, "three": 3}, module=module.__name__)  # type: ignore[misc]
    setattr(module, name, made)
    return made


def _write(folder: Path, stage: int, num_ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    values = _values()
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    sys.modules.setdefault("deepspeed", types.ModuleType("deepspeed"))
    scaler = _own_class("LossScaler")()
    cut = {kind: _partitions(values[kind], stage, num_ranks) for kind in KINDS}
    for rank in range(num_ranks):
        state = {
            number: {kind: cut[kind][rank][number] for kind in KINDS[1:]} | {"step": 3.0}
            for number in range(len(SHAPES))
        }
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]}
        told = {"zero_stage": _stage_enum()(stage), "partition_count": num_ranks, "loss_scaler": scaler}
        if stage == 3:
            told |= {"fp32_flat_groups": cut["master"][rank], "optimizer_state_dict": base}
        else:
            told |= {"partition_count": [num_ranks] * 2, "base_optimizer_state": base}
            told |= {"single_partition_of_fp32_groups": cut["master"][rank]}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": told, "ds_config": {}, "ds_version": "0.19.8"}, tag / name)
    model = {
        "module": {"norm.running": torch.ones(2, dtype=torch.bfloat16)},
        "buffer_names": ["norm.running"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES],
        "shared_params": {"head.weight": "a.weight"},
        "lr_scheduler": {"last_epoch": 3},
        "ds_config": {"zero": scaler},
        "epoch": 2,
    }
    for rank in range(num_ranks if stage == 3 else 1):
        stem = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(model, tag / f"{stem}_model_states.pt")
    return values


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parameters_and_moments_come_out_bit_by_bit(tmp_path: Path, stage: int, num_ranks: int) -> None:
    values = _write(tmp_path, stage, num_ranks)
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


def test_groups_of_several_vectors_keep_all_their_parameters(tmp_path: Path) -> None:
    _write(tmp_path, 3, 2)
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
    values = _write(tmp_path / "ds", 2, 2)
    verb = ["ckpt", "convert", str(tmp_path / "ds"), str(tmp_path / "c"), "--from", "deepspeed-zero", "--to"]
    main([*verb, "torch_dist"], standalone_mode=False)
    loaded = remesh.load({"model": {"a.weight": torch.zeros(5, 3)}}, tmp_path / "c")
    assert loaded["model"]["a.weight"].equal(values["master"]["a.weight"]) and loaded["program"] == {"epoch": 2}
    with pytest.raises(click.ClickException, match="--to zarr"):
        main([*verb, "zarr"], standalone_mode=False)


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    _write(tmp_path, 2, 3)
    next(tmp_path.rglob("*rank_1_*optim*")).unlink()
    with pytest.raises(CheckpointingException, match="2 files of optimizer states, expected one of each of 3 ranks"):
        read_zero(tmp_path)


class _Strange:
    """A class that is not DeepSpeed's."""


def test_a_class_that_is_not_deepspeeds_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, 2, 1)
    torch.save({"module": _Strange()}, next(tmp_path.rglob("*model_states.pt")))
    with pytest.raises(CheckpointingException, match="do not load it"):
        read_zero(tmp_path)


def test_partitions_that_do_not_fit_the_shapes_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, 2, 2)
    path = next(tmp_path.rglob("*model_states.pt"))
    path.rename(path.with_name("old"))
    model = {"module": {}, "param_shapes": [{"a": torch.Size((2,))}, {"b": torch.Size((7,))}]}
    torch.save(model, path)
    with pytest.raises(CheckpointingException, match=r"group 0 has 20 elements, expected 2"):
        read_zero(tmp_path)


def test_a_model_that_is_cut_itself_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, 1, 1)
    path = next(tmp_path.rglob("*optim_states.pt"))
    path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    with pytest.raises(CheckpointingException, match="data parallelism alone"):
        read_zero(tmp_path)
    with pytest.raises(CheckpointingException, match="no folder"):
        read_zero(tmp_path / "missing")
