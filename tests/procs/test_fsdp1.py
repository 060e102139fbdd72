"""Checkpoints of FSDP of version 1, sharded: what torch's DCP writes of them is read on any mesh, as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import Shard, distribute_tensor

import remesh
from remesh.cli import main
from remesh.testing.pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _save(path: Path) -> None:
    model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(path))


def _load(path: Path) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = _model().state_dict()
    wanted = {name: distribute_tensor(torch.zeros_like(one), mesh, [Shard(0)]) for name, one in expected.items()}
    found = remesh.load({"model": wanted}, path)["model"]
    return all(found[name].full_tensor().equal(one) for name, one in expected.items())


def test_what_two_ranks_of_fsdp_1_have_saved_three_load_cut_in_their_own_way(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save, 2, (tmp_path / "c",))
    assert all(ranks.run(_load, 3, (tmp_path / "c",)))


def _save_with_ours(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in _model().state_dict().items()}
    remesh.save({"model": state}, path)


def _load_with_fsdp_1(path: Path) -> bool:
    model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))
    expected = {name: one.clone() for name, one in _model().state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        model.load_state_dict(state["model"])
    with FullyShardedDataParallel.summon_full_params(model):
        return all(one.equal(expected[name]) for name, one in model.module.named_parameters())


def test_what_ours_has_saved_and_converted_fsdp_1_loads_on_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save_with_ours, 3, (tmp_path / "c",))
    main(["ckpt", "convert", str(tmp_path / "c"), str(tmp_path / "d"), "--to", "dcp"], standalone_mode=False)
    assert all(ranks.run(_load_with_fsdp_1, 2, (tmp_path / "d",)))
