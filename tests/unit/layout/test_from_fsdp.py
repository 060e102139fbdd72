"""FSDP2, alone and over tensor parallelism: pieces against the elements that torch really keeps.

The process group is torch's fake one: one process takes every rank in turn, nothing is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from remesh.layout import layout_from_placements
from remesh.layout.from_torch import forget_meshes, layout_of, mesh_from_torch, piece_of, placements_from_torch

WORLD_SIZE = 4


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1, parameter.numel() + 1).reshape(parameter.shape))
    return model


def _fsdp(mesh_shape: tuple[int, ...]) -> nn.Module:
    names = ("replicas", "shards")[-len(mesh_shape) :]
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return model


def _fsdp_over_tp(mesh_shape: tuple[int, ...]) -> nn.Module:
    names = ("replicas", "shards", "tp")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = _model()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model[:2], mesh["tp"], plan, src_data_rank=None)
    fully_shard(model[:2], mesh=mesh[names[:-1]])
    return model[:2]


CASES = [(_fsdp, (4,)), (_fsdp, (2, 2)), (_fsdp_over_tp, (2, 2)), (_fsdp_over_tp, (1, 4)), (_fsdp_over_tp, (4, 1))]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("build", "mesh_shape"), CASES, ids=[f"{build.__name__[1:]} {s}" for build, s in CASES])
def test_pieces_of_fsdp_parameters_are_what_each_rank_keeps(build, mesh_shape):
    whole = {name: parameter.detach() for name, parameter in _model().named_parameters()}
    painted = {name: torch.zeros_like(value) for name, value in whole.items()}
    for rank in range(WORLD_SIZE):
        with _as_rank(rank):
            for name, parameter in build(mesh_shape).named_parameters():
                piece = piece_of(parameter)
                flat = piece.tensor.contiguous().reshape(-1)
                for shard in piece.shards:
                    if shard.box.is_empty:
                        continue
                    held = flat.as_strided(shard.box.shape, shard.strides, shard.offset)
                    assert torch.equal(held, whole[name][shard.box.slices()]), (rank, name, parameter.placements)
                    painted[name][shard.box.slices()] = held
                layout = layout_of(parameter)
                layout.check(name)
                assert [s.box for s in layout.shards_of(rank)] == [s.box for s in piece.shards]
                assert layout == layout_from_placements(
                    tuple(parameter.shape),
                    mesh_from_torch(parameter.device_mesh),
                    placements_from_torch(parameter.placements),
                    "float32",
                )
            names = {name for name, _ in build(mesh_shape).named_parameters()}
    assert all(torch.equal(painted[name], whole[name]) for name in names)


def test_a_piece_needs_no_process_group():
    with _as_rank(2):
        parameters = dict(_fsdp((4,)).named_parameters())
    assert not dist.is_initialized()
    starts = [shard.box.start for shard in itertools.chain(*(piece_of(p).shards for p in parameters.values()))]
    assert starts == [(4, 0), (4,), (4, 0), (4,), (1, 0), (1,)]


def test_a_process_that_changes_its_rank_gets_its_new_coordinate():
    coordinates = []
    for rank in (0, 3):
        with _as_rank(rank):
            mesh = init_device_mesh("cpu", (4,))
            tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
            coordinates.append((tensor * 2).device_mesh.get_coordinate())
    assert coordinates == [(0,), (3,)]
