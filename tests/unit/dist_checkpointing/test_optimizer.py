"""Optimizer state is placed like the parameters, through factories too, and comes back on another split."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from remesh import dist_checkpointing
from remesh.dist_checkpointing import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.optimizer import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)


def build_swiglu(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(f"{key}_{name}", half, replica_id=replica_id)
        for name, half in zip("wv", data.chunk(2), strict=True)
    ]


class Model(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.plain = torch.nn.Parameter(torch.full((4, 2), value))
        self.gated = torch.nn.Parameter(torch.full((6, 2), value))

    def sharded(self) -> dict[str, Any]:
        state = self.state_dict(keep_vars=True)
        return {
            "plain": ShardedTensor.from_rank_offsets("plain", state["plain"]),
            "gated": ShardedTensorFactory("gated", state["gated"], build_swiglu, torch.cat),
        }


def trained(value: float, num_steps: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(value)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        (model.plain.square().sum() + model.gated.sum()).backward()
        optim.step()
    return model, optim


def sharded_state(model: Model, optim: torch.optim.Optimizer) -> dict[str, Any]:
    sharded = model.sharded()
    numbers = get_param_id_to_sharded_param_map(sharded, model.parameters())
    state = optim.state_dict()
    optim_state_to_sharding_state(state, numbers, exclude_keys=("step",))
    return {"model": sharded, "optim": state}


def test_optimizer_state_comes_back_through_tensors_and_factories(tmp_path: Path) -> None:
    model, optim = trained(1.0, 3)
    dist_checkpointing.save(sharded_state(model, optim), tmp_path)
    assert {"optimizer.state.exp_avg.plain", "optimizer.state.exp_avg_sq.gated_v"} <= set(
        dist_checkpointing.load_tensors_metadata(tmp_path)
    )
    other, fresh = trained(5.0, 1)
    loaded: Any = dist_checkpointing.load(sharded_state(other, fresh), tmp_path)
    for number, wanted in optim.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded["optim"]["state"][number][name], wanted[name])
    assert loaded["optim"]["param_groups"][0]["params"] == [0, 1]
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.1
    assert torch.equal(loaded["model"]["gated"], model.gated)


def test_numbers_are_those_of_the_first_occurrence() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}


def test_copies_of_parameters_are_not_found_and_a_hint_is_given(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(1.0)
    copies = {"plain": ShardedTensor.from_rank_offsets("plain", model.state_dict()["plain"])}
    with caplog.at_level(logging.WARNING):
        assert get_param_id_to_sharded_param_map(copies, model.parameters()) == {}
    assert "keep_vars=True" in caplog.text


def test_state_that_does_not_fit_is_refused() -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    with pytest.raises(CheckpointingException, match="shape \\(3,\\)"):
        make_sharded_optimizer_tensor(shard, torch.zeros(3), "optimizer.state.exp_avg")
    with pytest.raises(ValueError, match="Param id 4 does not match"):
        optim_state_to_sharding_state({"state": {4: {"exp_avg": torch.zeros(2)}}, "param_groups": []}, {0: shard})
    state = {"state": {}, "param_groups": [{"params": [0]}]}
    optim_state_to_sharding_state(state, {})
    assert isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)  # type: ignore[index]
