"""Checkpoints of FSDP of version 1, sharded: what torch's DCP writes of them is read on any mesh, as any other."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.cli import main
from remesh.testbed.pool import RankPool
from tests.profiles import seeds

pytestmark = pytest.mark.filterwarnings("ignore")


class _Net(nn.Module):
    """Layers of any sizes, the last with the first's weight under a second name if that is wanted."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        sizes = [chance.randint(1, 9) for _ in range(chance.randint(2, 4))]
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=chance.random() < 0.7) for pair in pairs)
        self.norm, self.scale = nn.BatchNorm1d(sizes[-1]), nn.Parameter(torch.randn(1))
        self.tied = nn.Linear(*sizes[:2], bias=False)
        if chance.random() < 0.5:
            self.tied.weight = self.layers[0].weight


def _model(seed: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return _Net(seed)


def _save(path: Path, seed: int = 4) -> None:
    model = FullyShardedDataParallel(_model(seed), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(path))


def _load(path: Path, seed: int = 4) -> bool:
    """Whether all is as it was, each tensor cut along a dim that chance chooses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected, chance = _model(seed).state_dict(), random.Random(seed)
    cut = {name: Shard(chance.randrange(one.ndim)) if one.ndim else Replicate() for name, one in expected.items()}
    wanted = {name: distribute_tensor(one.clone().zero_(), mesh, [cut[name]]) for name, one in expected.items()}
    found = remesh.load({"model": wanted}, path)["model"]
    return all(found[name].full_tensor().equal(one) for name, one in expected.items())


@pytest.mark.parametrize("seed", seeds(12, quick=4))
def test_any_model_of_fsdp_1_comes_back_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    """Sizes that no number of ranks divides, tensors of one element, buffers, second names of a parameter."""
    chance = random.Random(seed)
    ranks.run(_save, chance.randint(1, 4), (tmp_path / "c", seed))
    assert all(ranks.run(_load, chance.randint(1, 4), (tmp_path / "c", seed)))


@pytest.mark.parametrize("seed", seeds(12, quick=4))
def test_what_is_missing_or_cut_off_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    """The index names files that are not there, or that end before what they should hold."""
    chance = random.Random(seed)
    ranks.run(_save, chance.randint(2, 4), (tmp_path / "c", seed))
    hurt = chance.choice(sorted((tmp_path / "c").glob("*.distcp")))
    content = hurt.read_bytes()
    hurt.unlink()
    if chance.random() < 0.5:
        hurt.write_bytes(content[: chance.randrange(len(content) // 2)])
    told = ranks.run(_refusal, chance.randint(1, 4), (tmp_path / "c", seed))
    assert told[0] and told == [told[0]] * len(told) and hurt.name in told[0], told


def _refusal(path: Path, seed: int) -> str:
    try:
        _load(path, seed)
    except CheckpointingException as raised:
        return str(raised)
    return ""


def test_what_two_ranks_of_fsdp_1_have_saved_three_load_cut_in_their_own_way(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save, 2, (tmp_path / "c",))
    assert all(ranks.run(_load, 3, (tmp_path / "c",)))


def _save_with_ours(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = {0: Replicate()}
    state = {
        name: distribute_tensor(one, mesh, [cut.get(one.ndim, Shard(0))]) for name, one in _model().state_dict().items()
    }
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
