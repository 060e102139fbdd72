"""From any placement on any mesh to any other, through a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import remesh
from remesh.foundation.errors import LayoutError
from remesh.testbed.pool import RankPool
from tests.profiles import so_many

PLACEMENTS: dict[int, list[list[Placement]]] = {
    1: [[Shard(0)], [Shard(1)], [Replicate()]],
    2: [
        *[[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]],
        *[[Shard(0), Replicate()], [Replicate(), Replicate()], [_StridedShard(0, split_factor=2), Shard(0)]],
    ],
}
SHAPES = [(12, 4), (7, 5), (3, 9), (1, 1), (2, 3, 5)]


def make_whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    if strided and whole.shape[0] % mesh.size():
        placements = [Shard(0), Shard(0)]  # torch says what _StridedShard means for even tensors only
    elif strided:
        # distribute_tensor does not know this placement; it is what sharding twice, inner axis first, leaves.
        inner = distribute_tensor(whole, mesh, [Replicate(), placements[1]])
        size, rank = mesh.size(0), mesh.get_coordinate()[0]  # type: ignore[index]
        local = inner.to_local().chunk(size)[rank].clone()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return distribute_tensor(whole.clone(), mesh, placements)


def states(fill: bool) -> dict[str, dict[str, Any]]:
    """By name of mesh and placement, a tensor of each shape."""
    world_size = dist.get_world_size()
    meshes = {1: init_device_mesh("cpu", (world_size,))}
    if world_size % 2 == 0:
        meshes[2] = init_device_mesh("cpu", (world_size // 2, 2))
    result: dict[str, dict[str, Any]] = {"plain": {str(s): make_whole(s) * fill for s in SHAPES}}
    for ndim, mesh in meshes.items():
        for number, placements in enumerate(PLACEMENTS[ndim]):
            wholes = {str(shape): make_whole(shape) * (1.0 if fill else 0.0) for shape in SHAPES}
            result[f"{ndim}d-{number}"] = {name: placed(whole, mesh, placements) for name, whole in wholes.items()}
    return result


def save_all(root: Path) -> list[str]:
    for name, state in states(fill=True).items():
        remesh.save({"tensors": state, "name": name}, root / name)
    return sorted(states(fill=True))


def load_all(root: Path, names: list[str]) -> int:
    num_compared = 0
    for saved in names:
        expected = states(fill=True)
        for name, state in states(fill=False).items():
            loaded = remesh.load({"tensors": state}, root / saved)
            assert loaded["name"] == saved
            for shape, tensor in state.items():
                found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                wanted = expected[name][shape]
                wanted = wanted.to_local() if isinstance(wanted, DTensor) else wanted
                assert torch.equal(found, wanted), (saved, name, shape)
                num_compared += 1
    return num_compared


@pytest.mark.parametrize(
    ("num_savers", "num_loaders"),
    [
        (1, 4),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 6), (4, 2), (4, 4), (2, 4), (4, 1))),
    ],
)
def test_every_layout_loads_into_every_other(
    ranks: RankPool, tmp_path: Path, num_savers: int, num_loaders: int
) -> None:
    names = ranks.run(save_all, num_savers, (tmp_path,))[0]
    names = names[:: 2 if num_savers == num_loaders else 3]  # every target layout, a sample of the sources
    assert min(ranks.run(load_all, num_loaders, (tmp_path, names), timeout_s=110)) >= 4 * len(names)


def save_natively(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "w": placed(make_whole((7, 5)), mesh, [Shard(0), Shard(1)]),
        "strided": placed(make_whole((8, 3)), mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "plain": make_whole((3,)),
    }
    dcp.save({"model": state, "step": 5, "lrs": [1, 2]}, checkpoint_id=directory)


def load_either(directory: Path, natively: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "w": placed(torch.zeros(7, 5), mesh, [Shard(1)]),
        "strided": placed(torch.zeros(8, 3), mesh, [Shard(0)]),
        "plain": torch.zeros(3),
    }
    if natively:
        dcp.load({"model": state}, checkpoint_id=directory)
    else:
        loaded = remesh.load({"model": state, "step": 0, "lrs": []}, directory)
        assert (loaded["step"], loaded["lrs"]) == (5, [1, 2])
    assert torch.equal(state["w"].full_tensor(), make_whole((7, 5)))  # type: ignore[attr-defined]
    assert torch.equal(state["strided"].full_tensor(), make_whole((8, 3)))  # type: ignore[attr-defined]
    assert torch.equal(state["plain"], make_whole((3,)))


def save_ours(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "w": placed(make_whole((7, 5)), mesh, [Shard(0), Shard(1)]),
        "strided": placed(make_whole((8, 3)), mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "plain": make_whole((3,)),
    }
    remesh.save({"model": state, "step": 5, "lrs": [1, 2]}, directory)


@pytest.mark.parametrize("num_loaders", [1, 3])
def test_native_torch_reads_ours_and_we_read_theirs(ranks: RankPool, tmp_path: Path, num_loaders: int) -> None:
    ranks.run(save_ours, 4, (tmp_path / "ours",))
    ranks.run(load_either, num_loaders, (tmp_path / "ours", True))
    ranks.run(load_either, num_loaders, (tmp_path / "ours", False))
    ranks.run(save_natively, 4, (tmp_path / "theirs",))
    ranks.run(load_either, num_loaders, (tmp_path / "theirs", False))


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 12)
        self.down = torch.nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def build(mesh_shape: tuple[int, int], seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 over ``dp`` and tensor parallelism over ``tp``, after one step."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optim.step()
    return model, optim


def full(state: Any) -> Any:
    """The nest with whole tensors."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    if isinstance(state, list):
        return [full(value) for value in state]
    return state.full_tensor().detach().clone() if isinstance(state, DTensor) else state


def train_and_save(mesh_shape: tuple[int, int], directory: Path) -> Any:
    model, optim = build(mesh_shape, seed=0)
    state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": 1}
    remesh.save(state, directory)
    return full(state)


def load_and_show(mesh_shape: tuple[int, int], directory: Path) -> Any:
    model, optim = build(mesh_shape, seed=1)
    loaded = remesh.load({"model": model.state_dict(), "optim": optim.state_dict(), "step": 0}, directory)
    optim.load_state_dict(loaded["optim"])
    return full({"model": model.state_dict(), "optim": optim.state_dict(), "step": loaded["step"]})


def test_a_model_under_fsdp2_and_tensor_parallelism_changes_its_mesh(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(train_and_save, 4, ((2, 2), tmp_path))[0]
    for mesh_shape in ((3, 2), (1, 4), (2, 2), (1, 2), (4, 1))[: so_many(5, quick=2)]:
        for found in ranks.run(load_and_show, mesh_shape[0] * mesh_shape[1], (mesh_shape, tmp_path)):
            assert str(found) == str(saved)


def save_balanced(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    replicated = {f"r{index}": torch.zeros(40_000) for index in range(8)}
    split = {f"s{index}": placed(torch.zeros(4, 20_000), mesh, [Replicate(), Shard(0)]) for index in range(8)}
    remesh.save({**replicated, **split}, directory)


def test_replicas_share_the_writing_and_every_box_is_written_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_balanced, 4, (tmp_path,))
    sizes = [(tmp_path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    num_bytes = 4 * (8 * 40_000 + 8 * 80_000)
    assert num_bytes <= sum(sizes) < 1.02 * num_bytes
    assert max(sizes) < 1.05 * num_bytes / 4


def save_partial(directory: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    with pytest.raises(LayoutError) as caught:
        remesh.save({"w": tensor}, directory)
    return str(caught.value)


def test_partial_sums_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    texts = ranks.run(save_partial, 2, (tmp_path / "new",))
    assert "'w' is a partial sum over its mesh" in texts[0]
    assert texts[0] == texts[1]
    assert not (tmp_path / "new").exists()
