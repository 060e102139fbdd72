"""Checkpoints of Megatron's old kind become ours. Whole models are cut by Megatron's rules here, and found again.

What Megatron itself has written is converted in ``tests/interop/test_megatron_training.py``.
"""

from __future__ import annotations

import enum
import random
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import remesh
from remesh.checkpoint.errors import CheckpointingException
from remesh.cli import main
from remesh.errors import ConfigError
from remesh.integrations.megatron_legacy import FILE, read_megatron_legacy

HIDDEN, INNER, VOCABULARY, SEQUENCE = 4, 8, 12, 3
KINDS = ("exp_avg", "exp_avg_sq")


class Model:
    """A whole model of random values, and how Megatron cuts it."""

    def __init__(self, seed: int, num_layers: int, *, gated: bool, tied: bool) -> None:
        self.gated, self.tied, self.num_layers = gated, tied, num_layers
        generator = torch.Generator().manual_seed(seed)
        inner = 2 * INNER if gated else INNER
        of_layer = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
            "self_attention.linear_proj.bias": (HIDDEN,),
            "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
            "self_attention.linear_qkv.bias": (3 * HIDDEN,),
            "pre_mlp_layernorm.weight": (HIDDEN,),
            "mlp.linear_fc1.weight": (inner, HIDDEN),
            "mlp.linear_fc1.bias": (inner,),
            "mlp.linear_fc2.weight": (HIDDEN, INNER),
            "mlp.linear_fc2.bias": (HIDDEN,),
        }
        self.shapes = {
            "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
            "embedding.position_embeddings.weight": (SEQUENCE, HIDDEN),
            **{f"decoder.layers.{at}.{name}": shape for at in range(num_layers) for name, shape in of_layer.items()},
            "decoder.final_layernorm.weight": (HIDDEN,),
            "output_layer.weight": (VOCABULARY, HIDDEN),
        }
        self.whole = {
            kind: {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
            for kind in ("", *KINDS)
        }
        for values in self.whole.values():
            if tied:
                values["output_layer.weight"] = values["embedding.word_embeddings.weight"]

    def part_of(self, kind: str, name: str, rank: int, size: int) -> torch.Tensor:
        """What a rank of tensor parallelism holds."""
        tensor = self.whole[kind][name]
        if "linear_fc1" in name and self.gated:
            gate, other = tensor.chunk(2)
            return torch.cat([gate.chunk(size)[rank], other.chunk(size)[rank]])
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return tensor.chunk(size, 1)[rank].clone()
        if "word_embeddings" in name or "output_layer" in name or "linear_qkv" in name or "linear_fc1" in name:
            return tensor.chunk(size)[rank].clone()
        return tensor.clone()


def _stage_names(model: Model, stages: list[list[list[int]]], stage: int) -> list[dict[str, str]]:
    """Of each chunk of a stage: local name -> global name. ``stages[p][v]`` has the numbers of layers."""
    last = len(stages) - 1
    chunks = []
    for at, layers in enumerate(stages[stage]):
        names = {}
        if stage == 0 and at == 0:
            names |= {name: name for name in model.shapes if name.startswith("embedding.")}
        for local, number in enumerate(layers):
            of_layer = [name for name in model.shapes if name.startswith(f"decoder.layers.{number}.")]
            names |= {name.replace(f"layers.{number}.", f"layers.{local}."): name for name in of_layer}
        if stage == last and at == len(stages[stage]) - 1:
            names["decoder.final_layernorm.weight"] = "decoder.final_layernorm.weight"
            if not model.tied or last:
                names["output_layer.weight"] = "output_layer.weight"
        chunks.append(names)
    return chunks


def _enum() -> Any:
    """A member of an enumeration of Megatron's, which is not installed here."""
    module = sys.modules.setdefault("megatron.stand_in", types.ModuleType("megatron.stand_in"))
    sys.modules.setdefault("megatron", types.ModuleType("megatron"))
    made = enum.Enum("ModelType", {"one": 1}, module=module.__name__)
    module.ModelType = made  # type: ignore[attr-defined]
    return made.one  # type: ignore[attr-defined]


def _write(model: Model, place: Path, size: int, stages: list[list[list[int]]], *, half: bool = False) -> None:
    arguments = Namespace(
        tensor_model_parallel_size=size,
        pipeline_model_parallel_size=len(stages),
        swiglu=model.gated,
        untie_embeddings_and_output_weights=not model.tied,
        model_type=_enum(),
    )
    for rank in range(size):
        for stage in range(len(stages)):
            chunks = _stage_names(model, stages, stage)
            parameters = [name for chunk in chunks for name in chunk.values()]
            groups: list[list[str]] = [[], []]
            for name in parameters:
                groups[len(model.shapes[name]) == 1 or name.endswith(".bias")].append(name)
            numbers = {name: number for number, name in enumerate([*groups[0], *groups[1]])}
            state = {
                number: {kind: model.part_of(kind, name, rank, size) for kind in KINDS} | {"step": torch.tensor(5.0)}
                for name, number in numbers.items()
            }
            told = [
                {"wd_mult": wd_mult, "lr": 0.1, "params": [numbers[name] for name in names]}
                for wd_mult, names in zip((1.0, 0.0), groups, strict=True)
            ]
            inner = {"state": state, "param_groups": told}
            masters = [[model.part_of("", name, rank, size) for name in names] for names in groups]
            models = [
                {
                    local: model.part_of("", name, rank, size).to(torch.bfloat16 if half else torch.float32)
                    for local, name in chunk.items()
                }
                | {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
                for chunk in chunks
            ]
            keys = ["model"] if len(models) == 1 else [f"model{at}" for at in range(len(models))]
            content = {
                "args": arguments,
                "checkpoint_version": 3.0,
                "iteration": 7,
                **dict(zip(keys, models, strict=True)),
                "optimizer": {"optimizer": inner, "fp32_from_fp16_params": masters} if half else inner,
                "opt_param_scheduler": {"num_steps": 7},
                "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
            }
            folder = place / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(stages) > 1 else ""))
            folder.mkdir(parents=True)
            torch.save(content, folder / FILE)


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


def _random_stages(chance: random.Random) -> tuple[list[list[list[int]]], int]:
    """Layers of each chunk of each stage, as many as chance wants, one after another through virtual stages."""
    num_stages, num_virtual = chance.choice([(1, 1), (2, 1), (2, 2), (3, 1)])
    stages: list[list[list[int]]] = [[] for _ in range(num_stages)]
    count = 0
    for _ in range(num_virtual):
        for stage in stages:
            length = chance.randint(1, 2)
            stage.append(list(range(count, count + length)))
            count += length
    return stages, count


@pytest.mark.parametrize("seed", range(12))
def test_whole_tensors_come_out_of_any_cut(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stages, num_layers = _random_stages(chance)
    model = Model(seed, num_layers, gated=chance.random() < 0.5, tied=chance.random() < 0.5)
    half = chance.random() < 0.5
    _write(model, tmp_path / "iter_0000007", chance.choice([1, 2, 4]), stages, half=half)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    state = read_megatron_legacy(tmp_path)
    found = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    expected = _expected(model, half)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    optimizer = state["optimizer"]["optimizer"] if half else state["optimizer"]
    assert optimizer == {
        "state": {"common_step": 5.0},
        "param_groups": [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": 0.1}],
    }
    assert state["iteration"] == 7 and state["opt_param_scheduler"] == {"num_steps": 7}
    assert state["args"].no_save_rng and not hasattr(state["args"], "model_type") and "rng_state" not in state


def test_the_verb_makes_a_checkpoint_of_ours(tmp_path: Path) -> None:
    model = Model(1, 2, gated=True, tied=False)
    _write(model, tmp_path / "old", 2, [[[0]], [[1]]])
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
    _write(Model(1, 1, gated=False, tied=False), tmp_path, 1, [[[0]]])
    _change(
        tmp_path, lambda told: told["model"].update({"odd": torch.ones(2), "decoder.layers.0.strange": torch.ones(2)})
    )
    _change(tmp_path, lambda told: told.pop("optimizer"))
    with pytest.raises(ConfigError, match=r"2 tensors are cut.*\n  odd\n  decoder.layers.0.strange"):
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
    _write(Model(1, 1, gated=False, tied=False), tmp_path, 2, [[[0]]])
    _change(tmp_path, change)
    with pytest.raises(CheckpointingException, match=told):
        read_megatron_legacy(tmp_path)


class _Strange:
    """A class that is not Megatron's."""


def test_a_missing_part_a_strange_class_and_a_distributed_optimizer_are_refused(tmp_path: Path) -> None:
    _write(Model(1, 1, gated=False, tied=False), tmp_path, 2, [[[0]]])
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
