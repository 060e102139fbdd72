"""Checkpoints of Megatron's old kind become ours. Whole models are cut by Megatron's rules here, and found again.

What Megatron itself has written is converted in ``tests/interop/test_megatron_training.py``.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.foreign.megatron_legacy import FILE, read_megatron_legacy
from remesh.cli import main
from remesh.foundation.errors import ConfigError
from tests.profiles import seeds
from tests.unit.checkpoint.foreign.hurt_files import flip, lose, shorten
from tests.unit.checkpoint.foreign.megatron_model import HIDDEN, VOCABULARY, Model, random_stages, write_parts


def _expected(model: Model, half: bool) -> dict[str, torch.Tensor]:
    """Stacked, by the names of Megatron's new kind."""
    renamed = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    found: dict[str, torch.Tensor] = {}
    for kind, values in model.whole.items():
        kinds = {f"optimizer.state.{kind}.": values} if kind else {"": values}
        if half and not kind:
            kinds = {"": {name: one.bfloat16() for name, one in values.items()}, "optimizer.state.fp32_param.": values}
        for prefix, tensors in kinds.items():
            for name, tensor in tensors.items():
                if "layers.0." in name:
                    key = name.replace("layers.0.", "layers.")
                    for old, new in renamed.items():
                        key = key.replace(old, new)
                    every = [tensors[name.replace("layers.0.", f"layers.{at}.")] for at in range(model.num_layers)]
                    found[prefix + key] = torch.stack(every)
                elif "layers." not in name and not (model.tied and name == "output_layer.weight"):
                    found[prefix + name] = tensor
    return found


@pytest.mark.parametrize("seed", seeds(12, quick=4))
def test_whole_tensors_come_out_of_any_cut(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stages, num_layers = random_stages(chance)
    model = Model(seed, num_layers, gated=chance.random() < 0.5, tied=chance.random() < 0.5)
    half = chance.random() < 0.5
    write_parts(model, tmp_path / "iter_0000007", chance.choice([1, 2, 4]), stages, half=half)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    state = read_megatron_legacy(tmp_path)
    _check(state, model, half)
    optimizer = state["optimizer"]["optimizer"] if half else state["optimizer"]
    assert optimizer == {
        "state": {"common_step": 5.0},
        "param_groups": [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": 0.1}],
    }
    assert state["iteration"] == 7 and state["opt_param_scheduler"] == {"num_steps": 7}
    assert state["args"].no_save_rng and not hasattr(state["args"], "model_type") and "rng_state" not in state


def _check(state: dict[str, Any], model: Model, half: bool) -> None:
    found = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    expected = _expected(model, half)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", [shorten, flip, lose])
def test_parts_that_were_hurt_are_refused(tmp_path: Path, change: Any, seed: int) -> None:
    chance = random.Random(seed)
    stages, num_layers = random_stages(chance)
    model = Model(seed, num_layers, gated=chance.random() < 0.5, tied=chance.random() < 0.5)
    half = chance.random() < 0.5
    write_parts(model, tmp_path, chance.choice([1, 2, 4]), stages, half=half)
    change(chance.choice(sorted(tmp_path.rglob(FILE))), chance)
    with pytest.raises((CheckpointingException, ConfigError)):
        read_megatron_legacy(tmp_path)


def test_the_verb_makes_a_checkpoint_of_ours(tmp_path: Path) -> None:
    model = Model(1, 2, gated=True, tied=False)
    write_parts(model, tmp_path / "old", 2, [[[0]], [[1]]])
    verb = ["ckpt", "convert", str(tmp_path / "old"), str(tmp_path / "new"), "--from", "megatron-legacy", "--to"]
    main([*verb, "torch_dist"], standalone_mode=False)
    loaded = remesh.load({"output_layer.weight": torch.zeros(VOCABULARY, HIDDEN)}, tmp_path / "new")
    assert loaded["output_layer.weight"].equal(model.whole[""]["output_layer.weight"]) and loaded["iteration"] == 7
    with pytest.raises(click.ClickException, match="--to zarr"):
        main([*verb, "zarr"], standalone_mode=False)


def _change(place: Path, change: Any, pattern: str = "mp_rank_00*") -> None:
    path = next(place.glob(pattern)) / FILE
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_names_that_no_rule_maps_are_told_all_at_once(tmp_path: Path) -> None:
    write_parts(Model(1, 1, gated=False, tied=False), tmp_path, 1, [[[0]]])
    _change(
        tmp_path, lambda told: told["model"].update({"odd": torch.ones(2), "decoder.layers.0.strange": torch.ones(2)})
    )
    _change(tmp_path, lambda told: told.pop("optimizer"))
    with pytest.raises(ConfigError, match=r"2 tensors are cut.*\n  odd\n  decoder.layers.0.strange"):
        read_megatron_legacy(tmp_path)


def _saved(value: Any) -> io.BytesIO:
    """A state as Transformer Engine 1 leaves it: a file in memory."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("nothing", [_saved(None), torch.empty(0, dtype=torch.uint8), None])
def test_states_of_transformer_engine_without_scales_are_nothing(tmp_path: Path, nothing: Any) -> None:
    name = "decoder.layers.0.self_attention.linear_qkv._extra_state"
    write_parts(Model(1, 1, gated=False, tied=False), tmp_path, 1, [[[0]]])
    _change(tmp_path, lambda told: told["model"].update({name: nothing}))
    state = read_megatron_legacy(tmp_path)
    assert state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1"].data is None
    _change(tmp_path, lambda told: told["model"].update({name: _saved({"scale_fwd": torch.ones(3)})}))
    with pytest.raises(CheckpointingException, match=rf"{name}.*scales of FP8 are not read"):
        read_megatron_legacy(tmp_path)


def _break_group(told: Any) -> None:
    told["optimizer"]["param_groups"][0]["params"].pop()


def _break_state(told: Any) -> None:
    told["optimizer"]["state"][0]["exp_avg"] = torch.ones(3)


def _break_step(told: Any) -> None:
    told["optimizer"]["state"][0]["step"] = torch.tensor(4.0)


def _break_replica(told: Any) -> None:
    told["model"]["decoder.final_layernorm.weight"] += 1


def _break_version(told: Any) -> None:
    told["checkpoint_version"] = 1.0


def _chain(told: Any) -> None:
    told["optimizer"] = [told["optimizer"], told["optimizer"]]


def _make_expert(told: Any) -> None:
    told["args"].expert_model_parallel_size = 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_break_group, r"groups of \[6, 7\] parameters"),
        (_break_state, r"exp_avg of embedding.word_embeddings.weight as \(3,\)"),
        (_break_step, r"parameters at steps \[4.0, 5.0\]"),
        (_break_replica, "other values on other ranks"),
        (_break_version, "version 1.0, expected 3.0"),
        (_chain, "several chained"),
        (_make_expert, "2 ranks of expert parallelism"),
    ],
)
def test_what_is_wrong_in_the_files_is_refused_by_name(tmp_path: Path, change: Any, told: str) -> None:
    write_parts(Model(1, 1, gated=False, tied=False), tmp_path, 2, [[[0]]])
    _change(tmp_path, change)
    with pytest.raises(CheckpointingException, match=told):
        read_megatron_legacy(tmp_path)


class _Strange:
    """A class that is not Megatron's."""


def test_a_missing_part_a_strange_class_and_a_distributed_optimizer_are_refused(tmp_path: Path) -> None:
    write_parts(Model(1, 1, gated=False, tied=False), tmp_path, 2, [[[0]]])
    (tmp_path / "mp_rank_01" / "distrib_optim.pt").touch()
    with pytest.raises(CheckpointingException, match="ckpt-convert-format torch_dist"):
        read_megatron_legacy(tmp_path)
    (tmp_path / "mp_rank_01" / "distrib_optim.pt").unlink()
    (tmp_path / "mp_rank_01" / FILE).unlink()
    with pytest.raises(CheckpointingException, match=r"expected \['mp_rank_00', 'mp_rank_01'\]"):
        read_megatron_legacy(tmp_path)
    torch.save({"args": _Strange()}, tmp_path / "mp_rank_01" / FILE)
    with pytest.raises(CheckpointingException, match="_Strange"):
        read_megatron_legacy(tmp_path)
    with pytest.raises(CheckpointingException, match="no mp_rank_"):
        read_megatron_legacy(tmp_path / "missing")
