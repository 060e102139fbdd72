"""Weights of Hugging Face checkpoints onto an engine's parameters, compared with a loader that copies whole tensors."""

from __future__ import annotations

import pytest
import torch

import remesh
from remesh.foundation.errors import ConfigError
from remesh.integrations.fused_weights import (
    TRANSPOSED_EXPERTS,
    VLLM_RULES,
    EnginePlace,
    Rule,
    SourcePart,
    map_weights,
)

HEADS, WIDTH, HEAD, INNER, VOCABULARY = 8, 24, 4, 16, 50
LAYER = "model.layers.0"


def _sources(num_kv: int, *, tied: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    found = {
        "model.embed_tokens.weight": random(VOCABULARY, WIDTH),
        f"{LAYER}.input_layernorm.weight": random(WIDTH),
        f"{attention}.q_proj.weight": random(HEADS * HEAD, WIDTH),
        f"{attention}.k_proj.weight": random(num_kv * HEAD, WIDTH),
        f"{attention}.v_proj.weight": random(num_kv * HEAD, WIDTH),
        f"{attention}.q_proj.bias": random(HEADS * HEAD),
        f"{attention}.k_proj.bias": random(num_kv * HEAD),
        f"{attention}.v_proj.bias": random(num_kv * HEAD),
        f"{attention}.q_norm.weight": random(HEAD),
        f"{attention}.o_proj.weight": random(WIDTH, HEADS * HEAD),
        f"{attention}.rotary_emb.inv_freq": random(2),
        f"{mlp}.gate_proj.weight": random(INNER, WIDTH),
        f"{mlp}.up_proj.weight": random(INNER, WIDTH),
        f"{mlp}.down_proj.weight": random(WIDTH, INNER),
        "model.norm.weight": random(WIDTH),
    }
    return found if tied else {**found, "lm_head.weight": random(VOCABULARY, WIDTH)}


def _expected(whole: dict[str, torch.Tensor], rank: int, size: int, num_kv: int) -> dict[str, torch.Tensor]:
    """As a loader of the engine makes it: it cuts whole tensors, and joins what it has cut."""

    def cut(name: str, dim: int = 0) -> torch.Tensor:
        return whole[name].chunk(size, dim)[rank]

    def cut_kv(name: str) -> torch.Tensor:
        heads = whole[name].unflatten(0, (num_kv, HEAD)).repeat_interleave(max(1, size // num_kv), 0)
        return heads.chunk(size)[rank].flatten(0, 1)

    def rows(name: str) -> torch.Tensor:
        per_rank = -(-VOCABULARY // 8) * 8 // size
        padded = torch.zeros(per_rank * size, WIDTH)
        padded[:VOCABULARY] = whole[name]
        return padded.chunk(size)[rank]

    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    head = "lm_head.weight" if "lm_head.weight" in whole else "model.embed_tokens.weight"
    fused = {
        f"{attention}.qkv_proj.{kind}": torch.cat(
            [cut(f"{attention}.q_proj.{kind}"), *(cut_kv(f"{attention}.{one}_proj.{kind}") for one in "kv")]
        )
        for kind in ("weight", "bias")
    }
    plain = (f"{LAYER}.input_layernorm.weight", f"{attention}.q_norm.weight", "model.norm.weight")
    return {
        **fused,
        **{name: whole[name] for name in plain},
        "model.embed_tokens.weight": rows("model.embed_tokens.weight"),
        "lm_head.weight": rows(head),
        f"{attention}.o_proj.weight": cut(f"{attention}.o_proj.weight", 1),
        f"{mlp}.gate_up_proj.weight": torch.cat([cut(f"{mlp}.gate_proj.weight"), cut(f"{mlp}.up_proj.weight")]),
        f"{mlp}.down_proj.weight": cut(f"{mlp}.down_proj.weight", 1),
    }


def _blank(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape) for name, tensor in like.items()}


def _shapes(whole: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}


def _fill(whole, targets, place, rules=VLLM_RULES) -> None:
    wanted = map_weights(targets, _shapes(whole), place, rules)
    remesh.reshard(whole, dict(wanted.pieces))
    wanted.copy_ties()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "num_kv"), [(1, 2), (2, 8), (2, 2), (4, 2), (8, 1), (8, 2)])
def test_every_rank_gets_what_its_loader_would_have_given_it(size: int, num_kv: int, tied: bool) -> None:
    whole = _sources(num_kv, tied=tied)
    for rank in range(size):
        expected = _expected(whole, rank, size, num_kv)
        targets = _blank(expected)
        _fill(whole, targets, EnginePlace(rank, size, num_kv))
        for name, tensor in expected.items():
            assert targets[name].equal(tensor), (rank, name)


def test_parameters_that_share_memory_are_filled_once() -> None:
    whole = _sources(2, tied=True)
    targets = _blank(_expected(whole, 1, 2, 2))
    targets["lm_head.weight"] = targets["model.embed_tokens.weight"]
    wanted = map_weights(targets, _shapes(whole), EnginePlace(1, 2, 2))
    assert not wanted.copies


def test_targets_without_memory_count_in_all_checks_and_get_nothing() -> None:
    whole = _sources(2, tied=True)
    like = _expected(whole, 1, 2, 2)
    with torch.device("meta"):
        targets = _blank(like)
    wanted = map_weights(targets, _shapes(whole), EnginePlace(1, 2, 2))
    assert wanted.made_of.keys() == like.keys() and len(wanted.copies) == 1  # of which none has an address of its own
    wanted.copy_ties()
    qkv = [f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"]
    assert wanted.made_of[f"{LAYER}.self_attn.qkv_proj.weight"] == frozenset(qkv)
    targets["lm_head.weight"] = torch.empty(3, WIDTH, device="meta")
    with pytest.raises(ConfigError, match="lm_head.weight"):
        map_weights(targets, _shapes(whole), EnginePlace(1, 2, 2))


def _experts(form: str, num_experts: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    gate, up = (torch.randn(num_experts, INNER, WIDTH, generator=generator) for _ in range(2))
    down = torch.randn(num_experts, WIDTH, INNER, generator=generator)
    stem = f"{LAYER}.mlp.experts"
    if form == "stacked":
        return {f"{stem}.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.down_proj": down}
    if form == "four dims":
        return {f"{stem}.gate_up_proj": torch.stack([gate, up], 1), f"{stem}.down_proj": down}
    if form == "transposed":
        both = torch.cat([gate, up], 1).transpose(1, 2).contiguous()
        return {f"{stem}.gate_up_proj": both, f"{stem}.down_proj": down.transpose(1, 2).contiguous()}
    names = ("w1", "w3", "w2") if form == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    return {
        f"{stem}.{expert}.{name}.weight": tensor[expert]
        for expert in range(num_experts)
        for name, tensor in zip(names, (gate, up, down), strict=True)
    }


@pytest.mark.parametrize("form", ["each", "mixtral", "stacked", "transposed", "four dims"])
def test_experts_of_any_form_fill_a_stack_cut_by_experts_and_by_ranks(form: str) -> None:
    whole, stacked = _experts(form), _experts("stacked")
    gate_up, down = stacked.values()
    rules = (*TRANSPOSED_EXPERTS, *VLLM_RULES) if form == "transposed" else VLLM_RULES
    for rank in range(2):
        expected = {
            f"{LAYER}.mlp.experts.w13_weight": torch.cat([one.chunk(2, 1)[rank] for one in gate_up.chunk(2, 1)], 1)[2:],
            f"{LAYER}.mlp.experts.w2_weight": down.chunk(2, 2)[rank][2:],
        }
        targets = _blank(expected)
        _fill(whole, targets, EnginePlace(rank, 2, first_expert=2), rules)
        assert all(targets[name].equal(tensor) for name, tensor in expected.items()), (form, rank)


def test_names_without_a_rule_are_told_all_at_once() -> None:
    targets = {"model.strange": torch.zeros(2), f"{LAYER}.mlp.gate_up_proj.weight": torch.zeros(4, 3)}
    sources = {"other.one": (2,), f"{LAYER}.mlp.gate_proj.weight": (6, 3), f"{LAYER}.mlp.up_proj.weight": (6, 3)}
    with pytest.raises(ConfigError) as told:
        map_weights(targets, sources, EnginePlace(0, 4))
    text = str(told.value)
    assert "'model.strange'" in text and "'other.one'" in text and "6 rows cannot be cut for 4 ranks" in text


def test_a_rule_of_the_user_goes_before_the_table() -> None:
    whole = {"encoder.a": torch.arange(6.0).reshape(3, 2), "encoder.b": torch.ones(1, 2)}
    targets = {"encoder.ab": torch.zeros(4, 2)}
    rule = Rule(r"(.+)\.ab", (SourcePart(r"\1.a", dim=None), SourcePart(r"\1.b", dim=None)))
    _fill(whole, targets, EnginePlace(), (rule, *VLLM_RULES))
    assert targets["encoder.ab"].equal(torch.cat([whole["encoder.a"], whole["encoder.b"]]))


@pytest.mark.parametrize("num_kv", [3, 5])
def test_kv_heads_that_ranks_cannot_share_are_refused(num_kv: int) -> None:
    whole = _sources(num_kv)
    targets = {f"{LAYER}.self_attn.qkv_proj.weight": torch.zeros(24, WIDTH)}
    with pytest.raises(ConfigError, match="cannot be cut for 4 ranks"):
        map_weights(targets, _shapes(whole), EnginePlace(0, 4, num_kv))
