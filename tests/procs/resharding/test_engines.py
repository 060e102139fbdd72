"""Weights of a trainer with Megatron's tensor and expert parallelism in engines that fuse, interleave, transpose, cut.

Nobody has a rule: each side's own loader of Hugging Face tensors is recorded. What arrives is compared with what that
loader makes of whole tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh.testbed.pool import RankPool

HIDDEN, GROUPS, HEADS_A_GROUP, HEAD, INNER, EXPERTS = 12, 4, 3, 4, 8, 4
ROWS = GROUPS * HEAD
SHAPES = {
    "q_proj": (GROUPS * HEADS_A_GROUP * HEAD, HIDDEN),
    "k_proj": (ROWS, HIDDEN),
    "v_proj": (ROWS, HIDDEN),
    "o_proj": (HIDDEN, GROUPS * HEADS_A_GROUP * HEAD),
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
    "kv_b_proj": (2 * ROWS, HIDDEN),
    "embed_tokens": (21, HIDDEN),
    **{f"experts.{expert}.{part}_proj": (INNER, HIDDEN) for expert in range(EXPERTS) for part in ("gate", "up")},
    "norm": (HIDDEN,),
}
Tensors = dict[str, torch.Tensor]


def _whole(version: int) -> Tensors:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _part(one: torch.Tensor, tp: int, dim: int = 0) -> torch.Tensor:
    return one.chunk(2, dim)[tp]


def _load_megatron(given: Tensors, into: Tensors, tp: int) -> None:
    """As Megatron's bridge does it: Q, K and V group by group in one tensor, gate and up of a rank in another."""
    q, k, v = (given[f"{name}_proj"].unflatten(0, (GROUPS, -1)) for name in "qkv")
    into["linear_qkv"].copy_(_part(torch.cat([q, k, v], 1), tp).flatten(0, 1))
    into["linear_proj"].copy_(_part(given["o_proj"], tp, 1))
    into["fc1"].copy_(torch.cat([_part(given["gate_proj"], tp), _part(given["up_proj"], tp)]))
    into["fc2"].copy_(_part(given["down_proj"], tp, 1))
    into["linear_kv_up"].copy_(_part(given["kv_b_proj"], tp))
    into["word_embeddings"].copy_(_part(torch.nn.functional.pad(given["embed_tokens"], (0, 0, 0, 3)), tp))
    for expert in range(EXPERTS // 2):  # expert parallelism
        number = tp * EXPERTS // 2 + expert
        both = [given[f"experts.{number}.{part}_proj"] for part in ("gate", "up")]
        into[f"experts.fc1.weight{expert}"].copy_(torch.cat(both))
    into["final_norm"].copy_(given["norm"])


def _megatron(tp: int) -> Tensors:
    made = {
        "linear_qkv": torch.zeros((HEADS_A_GROUP + 2) * ROWS // 2, HIDDEN),
        "linear_proj": torch.zeros(HIDDEN, HEADS_A_GROUP * ROWS // 2),
        "fc1": torch.zeros(INNER, HIDDEN),
        "fc2": torch.zeros(HIDDEN, INNER // 2),
        "linear_kv_up": torch.zeros(ROWS, HIDDEN),
        "word_embeddings": torch.zeros(12, HIDDEN),
        "final_norm": torch.zeros(HIDDEN),
    }
    return made | {f"experts.fc1.weight{expert}": torch.zeros(2 * INNER, HIDDEN) for expert in range(EXPERTS // 2)}


def _load_engine(given: Tensors, into: Tensors, tp: int) -> None:
    """As engines do it: fused QKV and gate_up, the absorbed factors of MLA, interleaved experts, a tied head."""
    into["qkv_proj"].copy_(torch.cat([_part(given[f"{name}_proj"], tp) for name in "qkv"]))
    into["o_proj"].copy_(_part(given["o_proj"], tp, 1))
    into["gate_up_proj"].copy_(torch.cat([_part(given["gate_proj"], tp), _part(given["up_proj"], tp)]))
    into["down_proj"].copy_(_part(given["down_proj"], tp, 1))
    key, value = _part(given["kv_b_proj"], tp).unflatten(0, (GROUPS // 2, 2 * HEAD)).split(HEAD, 1)
    into["w_uk_t"].copy_(key.transpose(1, 2))
    into["w_uv"].copy_(value)
    for expert in range(EXPERTS):
        for at, part in enumerate(("gate", "up")):
            into["experts.gate_up"][expert, at::2].copy_(_part(given[f"experts.{expert}.{part}_proj"], tp))
    rows = _part(torch.nn.functional.pad(given["embed_tokens"], (0, 0, 0, 3)), tp)
    into["embed_tokens"].copy_(rows)
    into["lm_head"].copy_(rows)
    into["norm"].copy_(given["norm"])


def _engine() -> Tensors:
    return {
        "qkv_proj": torch.zeros((HEADS_A_GROUP + 2) * ROWS // 2, HIDDEN),
        "o_proj": torch.zeros(HIDDEN, HEADS_A_GROUP * ROWS // 2),
        "gate_up_proj": torch.zeros(INNER, HIDDEN),
        "down_proj": torch.zeros(HIDDEN, INNER // 2),
        "w_uk_t": torch.zeros(GROUPS // 2, HIDDEN, HEAD),
        "w_uv": torch.zeros(GROUPS // 2, HEAD, HIDDEN),
        "experts.gate_up": torch.zeros(EXPERTS, INNER, HIDDEN),
        "embed_tokens": torch.zeros(12, HIDDEN),
        "lm_head": torch.zeros(12, HIDDEN),
        "norm": torch.zeros(HIDDEN),
    }


def _push_versions(in_place: bool) -> tuple[bool, int]:
    """Ranks 0 and 1 train, 2 and 3 generate; whether all versions arrive, and the bytes of one that this rank sends."""
    rank, tp = dist.get_rank(), dist.get_rank() % 2
    if rank < 2:
        held = _megatron(tp)
        give = remesh.record(lambda given, into: _load_megatron(given, into, tp), SHAPES, held).bind(held)
        assert not give.copies
        refit = remesh.Refit()
        for version in (1, 2, 3):
            _load_megatron(_whole(version), held, tp)
            moved = refit.push(dict(give.pieces), version)
        return True, sum(size for (source, _), size in moved.bytes_by_pair.items() if source == rank)
    take = _engine()
    recorded = remesh.record(lambda given, into: _load_engine(given, into, tp), SHAPES, take)
    refit = remesh.Refit(take, recorded=recorded, in_place=in_place)
    is_right = True
    for version in (1, 2, 3):
        refit.push()
        expected = _engine()
        _load_engine(_whole(version), expected, tp)
        with refit.read() as snapshot:
            is_right &= snapshot.version == version and snapshot.tensors.keys() == expected.keys()
            is_right &= all(one.equal(expected[name]) for name, one in snapshot.tensors.items())
    return is_right, 0


@pytest.mark.parametrize("in_place", [False, True])
def test_megatrons_shards_fill_an_engines_parameters_without_a_rule(ranks: RankPool, in_place: bool) -> None:
    told = ranks.run(_push_versions, 4, (in_place,))
    assert all(is_right for is_right, _ in told)
    once = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sum(sent for _, sent in told) == once, "every element leaves the trainers once"
