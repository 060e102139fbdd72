"""Names that are equal on several ranks, and values that are not: refused, or told where they may rightly differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.plain import entities_of
from remesh.checkpoint.run import common_data
from remesh.testbed.pool import RankPool

State = dict[str, Any]
_LARGE = (160, 161)


def _own(shape: tuple[int, ...] = _LARGE, seed: int | None = None) -> torch.Tensor:
    """Values that no other rank has, unless they give the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank() if seed is None else seed))


def _local_names_of_stages() -> State:
    return {"layers": {"0": {"weight": _own(), "bias": _own((8,))}, "1": {"weight": _own()}}}


def _plain_moments_beside_dtensors() -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(_own((640, 161), 1), mesh, [Shard(0)])
    return {"model": {"w": weight}, "optimizer": {"state": {"w": {"exp_avg": _own()}}}}


def _dtensors_on_disjoint_meshes() -> State:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))["tp"]
    local = _own((2, 3))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}


def _replicas_that_drifted() -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"norm": DTensor.from_local(_own((5,)), mesh, [Replicate()], run_check=False)}


def _one_element_in_a_small_dtype() -> State:
    return {"mask": torch.full((640, 161), dist.get_rank() == 3), "rest": torch.ones(3)}


def _strides_that_differ_too() -> State:
    own = _own((20, 20, 8, 20))
    return {"conv": own.to(memory_format=torch.channels_last) if dist.get_rank() % 2 else own}


_REFUSED: list[tuple[Callable[[], State], str]] = [
    (_local_names_of_stages, "3 tensors .*'layers.0.weight'"),
    (_plain_moments_beside_dtensors, "1 tensors .*'optimizer.state.w.exp_avg'"),
    (_dtensors_on_disjoint_meshes, "'w' on ranks"),
    (_replicas_that_drifted, "'norm'"),
    (_one_element_in_a_small_dtype, "'mask'"),
    (_strides_that_differ_too, "'conv'"),
]


def _save(make: Callable[[], State], folder: Path, background: bool) -> str:
    try:
        remesh.save(make(), folder, background=background).result()
    except CheckpointMismatchError as raised:
        return str(raised)
    return ""


@pytest.mark.parametrize(("make", "told"), _REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_one_ranks_values_are_not_stored_for_those_of_others(
    ranks: RankPool, tmp_path: Path, make: Callable[[], State], told: str
) -> None:
    for background in (False, True):
        found = ranks.run(_save, 4, (make, tmp_path / "c", background))
        assert len({*found}) == 1, "all ranks raise the same"
        with pytest.raises(CheckpointMismatchError, match=told):
            raise CheckpointMismatchError(found[0])
        assert "Piece" in found[0] and "prefix" in found[0]
    assert not (tmp_path / "c").exists()


def _as_entities(folder: Path) -> str:
    try:
        dist_checkpointing.save(entities_of(_local_names_of_stages()), folder)
    except CheckpointMismatchError as raised:
        return str(raised)
    return ""


def test_they_are_refused_as_entities(ranks: RankPool, tmp_path: Path) -> None:
    assert all("'layers.0.weight'" in found for found in ranks.run(_as_entities, 2, (tmp_path,)))


def _once_planned(folder: Path) -> list[str]:
    equal, own = {"w": _own(seed=7), "step": 1}, {"w": _own(), "step": 2}
    return [_save(lambda state=state: state, folder / str(at), False) for at, state in enumerate((equal, own, equal))]  # type: ignore[misc]


def test_a_save_that_is_planned_already_is_looked_at_again(ranks: RankPool, tmp_path: Path) -> None:
    for first, second, third in ranks.run(_once_planned, 3, (tmp_path,)):
        assert not first and not third and "'w' on ranks [0, 1, 2]" in second


def _warnings_of(state: State, folder: Path) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    common_data._warned.clear()
    logging.getLogger("remesh").addHandler(handler)
    try:
        for number in range(2):
            remesh.save(state, folder / str(number))
    finally:
        logging.getLogger("remesh").removeHandler(handler)
    return told


def _small_ones(folder: Path) -> tuple[list[str], State]:
    state = {"bn": {"mean": _own((9,)), "count": torch.tensor(3)}, "w": _own(seed=1)}
    told = _warnings_of(state, folder)
    return told, remesh.load({"bn": {"mean": torch.zeros(9)}}, folder / "0")["bn"]


def test_small_whole_tensors_that_differ_are_the_first_ranks_and_told_once(ranks: RankPool, tmp_path: Path) -> None:
    (first, found), *others = ranks.run(_small_ones, 3, (tmp_path,))
    assert len(first) == 1 and "1 small tensors" in first[0] and "'bn.mean'" in first[0] and "prefix" in first[0]
    assert all(told == [] and other["mean"].equal(found["mean"]) for told, other in others)


def _equal_ones(folder: Path) -> list[str]:
    """Equal by element, though not in memory, in order of names, or in what is held beside."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2))
    conv = _own((20, 20, 8, 20), 2)
    state = {
        "conv": conv.to(memory_format=torch.channels_last) if rank % 2 else conv,
        "t": _own((300, 7), 3).T if rank % 2 else _own((300, 7), 3).T.contiguous(),
        "c": torch.view_as_complex(_own((30, 2), 4)).conj()
        if rank % 2
        else torch.view_as_complex(_own((30, 2), 4)).conj().resolve_conj(),
        "nan": torch.full((3,), float("nan")),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(1.0),
        "hybrid": distribute_tensor(_own((8, 4), 5), mesh, [Replicate(), Shard(0)]),
        f"of {rank // 2}": _own((70, 300), rank // 2),
    }
    return _warnings_of(dict(reversed(state.items())) if rank % 2 else state, folder)


def test_equal_values_are_no_trouble(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_equal_ones, 4, (tmp_path,)) == [[]] * 4
