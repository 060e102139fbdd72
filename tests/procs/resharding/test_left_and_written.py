"""What nobody gives stays as readers saw it, and what is filled has a new version for autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import remesh
from remesh.layout import Box, Shard as HeldBox
from remesh.layout.from_torch import Piece
from remesh.resharding import Missing
from remesh.resharding.refit import Refit
from remesh.testbed.pool import RankPool
from tests.profiles import seeds


def _push_what_has_changed(seed: int, in_place: bool) -> None:
    """Rank 0 gives some rows of some tensors at each push; the oracle is what was last given of each row."""
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))
    names = ["a", "b", "c"]
    take: dict[str, Any] = {name: torch.full((4, 3), -1.0) for name in names}
    take["c"] = DTensor.from_local(torch.full((2, 3), -1.0), mesh, [Shard(0)], run_check=False)
    refit = Refit(take, missing=Missing.LEAVE, in_place=in_place)
    seen = {name: torch.full((4, 3), -1.0) for name in names}
    for version in range(8):
        give: dict[str, Piece] = {}
        for name in names:
            first, last = sorted(torch.randint(0, 5, (2,), generator=generator).tolist())
            if first < last and dist.get_rank() == 0:
                rows = torch.full((last - first, 3), float(version))
                give[name] = Piece(rows, (4, 3), (HeldBox(0, Box((first, 0), (last, 3)), 0, (3, 1)),))
            seen[name][first:last] = version
        refit.push(give, version if dist.get_rank() == 0 else None)
        with refit.read() as snapshot:
            for name, tensor in snapshot.tensors.items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                rows = seen[name].chunk(2)[dist.get_rank()] if isinstance(tensor, DTensor) else seen[name]
                assert isinstance(local, torch.Tensor) and local.equal(rows), (version, name, local, rows)


@pytest.mark.parametrize("in_place", [False, True])
def test_readers_see_of_each_element_what_was_last_given(ranks: RankPool, in_place: bool) -> None:
    for seed in seeds(20, quick=5):
        ranks.run(_push_what_has_changed, 2, (seed, in_place))


def _large(values: float) -> torch.Tensor:
    return torch.full((300, 100), values)


def _whole(values: float) -> torch.Tensor:
    return torch.full((3, 4), values)


def _strided(values: float) -> torch.Tensor:
    return torch.full((4, 3), values).t()


def _replicated(values: float) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.full((2, 2), values), mesh, [Replicate()], run_check=False)


def _cut(values: float) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.full((2, 2), values), mesh, [Shard(0)], run_check=False)


def _fill_behind_a_graph(make: Callable[[float], torch.Tensor], by: str, folder: Path) -> str:
    """The error of a backward through what was filled after the graph had saved it."""
    source, place = make(2.0), make(1.0).requires_grad_()
    if by == "load":
        remesh.save({"w": source}, folder)
    elif by == "reshard again":
        remesh.reshard({"w": source}, {"w": place})
    loss = (place * place).sum()
    if by == "load":
        remesh.load({"w": place}, folder)
    else:
        remesh.reshard({"w": source}, {"w": place})
    try:
        loss.backward()
    except RuntimeError as raised:
        return str(raised)
    return ""


@pytest.mark.parametrize("by", ["load", "reshard", "reshard again"])
@pytest.mark.parametrize("make", [_large, _whole, _strided, _replicated, _cut])
def test_a_graph_that_has_saved_what_is_filled_says_so(
    ranks: RankPool, tmp_path: Path, make: Callable[[float], torch.Tensor], by: str
) -> None:
    for told in ranks.run(_fill_behind_a_graph, 2, (make, by, tmp_path / "c")):
        assert "modified by an inplace operation" in told
