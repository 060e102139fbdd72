"""Whole tensors that ranks hold with other values: a checkpoint has all of them from the first rank, and no mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remesh
from remesh.integrations.first_rank import buffer_names, of_first_rank, with_first_buffers
from remesh.testbed.pool import RankPool


class _Net(nn.Module):
    """Layers with means and variances; a submodule has the name of DDP's, and a buffer is not kept at all."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(*(one for _ in range(3) for one in (nn.Linear(4, 4), nn.BatchNorm1d(4))))
        self.register_buffer("unkept", torch.zeros(2), persistent=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.module(given)


def _trained(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = _Net()
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    given = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(given).square().sum().backward()
    return model


def _save_model(kind: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = _trained(kind)
    weights = get_model_state_dict(model)
    names = buffer_names(model, weights)
    remesh.save(with_first_buffers(weights, names), folder)
    mine = {name: weights[name].clone() for name in sorted(names)}
    return mine, remesh.load({name: torch.zeros_like(one) for name, one in mine.items()}, folder, strict=False)


def test_buffers_of_a_model_are_all_those_of_the_first_rank(ranks: RankPool, tmp_path: Path) -> None:
    for kind in ("ddp", "fsdp2"):
        (first, found), (second, also_found) = ranks.run(_save_model, world_size=2, args=(kind, tmp_path / kind))
        kinds = ("running_mean", "running_var", "num_batches_tracked")
        assert sorted(first) == sorted(f"module.{at}.{one}" for at in (1, 3, 5) for one in kinds)
        assert not any(first[name].equal(second[name]) for name in first if "running" in name)
        assert all(one[name].equal(first[name]) for one in (found, also_found) for name in first)


def _save_plainly(folder: Path) -> list[dict[str, torch.Tensor]]:
    """What this rank has, and what is loaded of what all have saved twice, the second time as planned before."""
    model = _trained("ddp").module
    loaded = []
    for number in range(2):
        remesh.save({"model": model, "weight": torch.zeros(300, 100)}, folder / str(number))
        empty = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
        loaded.append(remesh.load({"model": empty}, folder / str(number))["model"])
        with torch.no_grad():
            model(torch.randn(6, 4, generator=torch.Generator().manual_seed(9 + dist.get_rank())))
        loaded.append({name: one.clone() for name, one in model.state_dict().items()})
    return loaded


def test_a_model_whose_small_tensors_differ_by_rank_is_saved_as_the_first_rank_has_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    told = ranks.run(_save_plainly, world_size=4, args=(tmp_path,))
    [_, before, second, _] = told[0]
    assert not before["module.1.running_mean"].equal(told[1][1]["module.1.running_mean"])
    for of_rank in told:
        assert all(of_rank[2][name].equal(one) for name, one in before.items())
        assert all(of_rank[2][name].equal(one) for name, one in second.items())


def _save_nest(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    nest = {
        "state": {f"w{at}": {"m": torch.full((at + 1,), float(rank)), "step": torch.tensor(rank)} for at in range(4)}
    }
    remesh.save({"optimizer": {**of_first_rank(nest), "groups": [{"lr": 0.1}]}}, folder)
    return remesh.load({"optimizer": {**nest, "groups": [{"lr": 0.0}]}}, folder)["optimizer"]


def test_a_nest_of_a_model_that_trains_apart_is_that_of_the_first_rank(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_save_nest, world_size=3, args=(tmp_path / "c",)):
        assert found["groups"] == [{"lr": 0.1}]
        assert not [value for of_one in found["state"].values() for value in of_one.values() if value.any()]
