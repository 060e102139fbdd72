"""A trainer under FSDP2 gives its weights to an engine's tensor parallelism, and no rank holds a whole tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import remesh
from remesh.integrations.fused_weights import EnginePlace, map_weights

WIDTH, HEADS, KV_HEADS, HEAD, INNER = 12, 4, 1, 4, 8
STEM = "model.layers.0"


def _trainer() -> dict[str, torch.Tensor]:
    """The whole model, equal wherever it is made."""
    torch.manual_seed(2)
    attention = {
        "q_proj": (HEADS * HEAD, WIDTH),
        "k_proj": (KV_HEADS * HEAD, WIDTH),
        "v_proj": (KV_HEADS * HEAD, WIDTH),
    }
    shapes = {f"{STEM}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    shapes |= {f"{STEM}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD), f"{STEM}.norm.weight": (WIDTH,)}
    shapes |= {f"{STEM}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _sync(num_trainers: int) -> bool:
    rank, num_engines = dist.get_rank(), dist.get_world_size() - num_trainers
    whole = _trainer()
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    mesh = DeviceMesh("cpu", list(range(num_trainers)))
    if rank < num_trainers:
        module = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(tensor) for name, tensor in whole.items()})
        fully_shard(module, mesh=mesh)
        give = {name.replace("/", "."): parameter.detach() for name, parameter in module.named_parameters()}
        remesh.reshard(give, {})
        return True
    tp_rank = rank - num_trainers
    rows = (HEADS + 2 * KV_HEADS * num_engines) * HEAD // num_engines
    targets = {
        f"{STEM}.self_attn.qkv_proj.weight": torch.zeros(rows, WIDTH),
        f"{STEM}.self_attn.o_proj.weight": torch.zeros(WIDTH, HEADS * HEAD // num_engines),
        f"{STEM}.mlp.gate_up_proj.weight": torch.zeros(2 * INNER // num_engines, WIDTH),
        f"{STEM}.norm.weight": torch.zeros(WIDTH),
    }
    wanted = map_weights(targets, shapes, EnginePlace(tp_rank, num_engines, KV_HEADS))
    remesh.reshard({}, dict(wanted.pieces))

    def cut(name: str, dim: int = 0) -> torch.Tensor:
        return whole[f"{STEM}.{name}.weight"].chunk(num_engines, dim)[tp_rank]

    kv = [whole[f"{STEM}.self_attn.{name}_proj.weight"] for name in "kv"]
    expected = [
        torch.cat([cut("self_attn.q_proj"), *kv]),
        cut("self_attn.o_proj", 1),
        torch.cat([cut("mlp.gate_proj"), cut("mlp.up_proj")]),
        whole[f"{STEM}.norm.weight"],
    ]
    return all(map(torch.equal, targets.values(), expected))


def test_a_trainers_shards_fill_the_fused_parameters_of_an_engine_bit_by_bit(ranks):
    assert all(ranks.run(_sync, world_size=4, args=(2,)))
