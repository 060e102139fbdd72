"""A whole GPT of random values, and the files that Megatron makes of it: the oracle of both ways."""

from __future__ import annotations

import enum
import random
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

FILE = "model_optim_rng.pt"
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


def write_parts(model: Model, place: Path, size: int, stages: list[list[list[int]]], *, half: bool = False) -> None:
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


def random_stages(chance: random.Random) -> tuple[list[list[list[int]]], int]:
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
