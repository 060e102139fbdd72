"""Reshards in windows: every value arrives, what has moved is free at once, and a lost rank costs nobody anything."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.multiprocessing.reductions import StorageWeakRef

import remesh
from remesh.comm.word_tree import Farewell
from remesh.foundation.errors import PeerError, PlanError
from remesh.foundation.options import OptionError
from remesh.layout.from_torch import Piece
from remesh.resharding import Target
from remesh.resharding.running.carry import Link
from remesh.testbed.pool import RankPool
from tests.procs.resharding.test_reshard import die_at_the_fifth
from tests.procs.resharding.test_reshard_faces import mesh_of, numbers, on
from tests.profiles import seeds


def _random_side(rng: random.Random, ndim: int) -> tuple[DeviceMesh, list[Placement]]:
    members = rng.sample(range(4), rng.choice([1, 2, 2, 3, 4, 4]))
    shape = (2, 2) if len(members) == 4 and rng.random() < 0.5 else (len(members),)
    some: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    return mesh_of(members, *shape), [rng.choice(some) for _ in shape]


def _move_at_random(seed: int) -> int:
    """All ranks draw the same tensors and layouts. Returns the number of windows."""
    rng = random.Random(seed)
    wholes, give, to, rights = {}, {}, {}, {}
    for number in range(rng.randint(0, 9)):
        shape = [rng.choice([0, 1, 3, 8, 17]) for _ in range(rng.randint(1, 3))]
        name, whole = f"t{number}", numbers(*shape, seed=number)
        mesh, placements = _random_side(rng, whole.ndim)
        tensor = on(whole, mesh, *placements)
        is_held_without_elements = rng.random() < 0.5
        if mesh.get_coordinate() is not None or is_held_without_elements:
            give[name] = DTensor.from_local(
                tensor.to_local().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        wholes[name] = whole
        if rng.random() < 0.9:
            mesh, placements = _random_side(rng, whole.ndim)
            to[name] = Target(mesh, placements)
            rights[name] = on(whole, mesh, *placements)
    left = give.keys() - to.keys()
    storages = {
        name: StorageWeakRef(tensor.to_local().untyped_storage())
        for name, tensor in give.items()
        if tensor.to_local().numel()
    }
    bytes_of = {name: tensor.to_local().nbytes for name, tensor in give.items()}
    held = sum(bytes_of[name] for name in to if name in bytes_of)
    windows = remesh.reshard_by_windows(give, to=to, window_bytes=rng.choice([1, 100, 1000, 1 << 30]))
    peak, arrived = held, set()
    tensor = None
    for made in windows:
        for name, got in made.items():
            assert torch.equal(got.to_local(), rights[name].to_local()), name
            assert name not in give and (name not in storages or storages[name].expired()), name
        held += sum(got.to_local().nbytes for got in made.values())
        peak = max(peak, held)
        held -= sum(bytes_of.get(name, 0) for name in made)
        arrived |= made.keys()
    assert arrived == to.keys() and give.keys() == left
    assert peak == windows.peak_bytes
    return len(windows)


@pytest.mark.parametrize("seed", seeds(24, quick=8))
def test_random_states_arrive_and_what_has_moved_is_free(ranks: RankPool, seed: int) -> None:
    assert len(set(ranks.run(_move_at_random, 4, (seed,)))) == 1


def _lose_a_rank() -> tuple[list[str], list[str]]:
    rank, mesh, names = dist.get_rank(), mesh_of(range(4)), [f"t{number}" for number in range(12)]
    give: dict[str, torch.Tensor | Piece] = {
        name: on(numbers(64, seed=n), mesh, Shard(0)) for n, name in enumerate(names)
    }
    came: dict[str, DTensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Link, "give", die_at_the_fifth(Link.give))
        with pytest.raises(PeerError):
            for made in remesh.reshard_by_windows(give, to=Target(mesh, [Replicate()]), window_bytes=600):
                came |= made
    for name, tensor in came.items():
        assert torch.equal(tensor.to_local(), numbers(64, seed=int(name[1:])))
    return sorted(came), sorted(give)


def test_what_had_moved_and_what_had_not_are_all_there_after_a_loss(ranks: RankPool) -> None:
    survivors = [told for told in ranks.run(_lose_a_rank, 4, dying=[1]) if isinstance(told, tuple)]
    assert len(survivors) == 3
    for came, left in survivors:
        assert came and left and sorted(came + left) == sorted(f"t{number}" for number in range(12))


def _lose_the_word_that_all_is_over(lost: int) -> list[str]:
    """One rank has all of the fifth window, and does not hear that the others have theirs."""
    rank, mesh, names = dist.get_rank(), mesh_of(range(4)), [f"t{number}" for number in range(8)]
    wholes = {name: numbers(8, 8, seed=n) for n, name in enumerate(names)}
    give: dict[str, torch.Tensor | Piece] = {name: on(whole, mesh, Shard(0)) for name, whole in wholes.items()}
    came: dict[str, torch.Tensor | Piece] = {}
    num_ends, real = 0, Farewell.wait

    def wait(farewell: Farewell, trouble: bool = False) -> bool:
        nonlocal num_ends
        num_ends += 1
        met_with_trouble = real(farewell, trouble)
        if rank == lost and num_ends == 5:
            raise RuntimeError("Connection closed by peer")
        return met_with_trouble

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Farewell, "wait", wait)
        with pytest.raises(PeerError):
            for made in remesh.reshard_by_windows(give, to=Target(mesh, [Shard(1)]), window_bytes=1):
                came |= made
    assert sorted([*came, *give]) == names
    again = dist.new_group()
    take = {name: torch.zeros(8, 8) for name in names}
    remesh.reshard({**came, **give}, take, group=again)
    for name, whole in wholes.items():
        assert torch.equal(take[name], whole), name
    return sorted(came)


@pytest.mark.parametrize("lost", range(4))
def test_whoever_does_not_hear_that_a_window_is_over_keeps_what_others_gave_up(ranks: RankPool, lost: int) -> None:
    came = ranks.run(_lose_the_word_that_all_is_over, 4, (lost,))
    assert {len(names) for names in came} == {4, 5}, "some had given up their old shards"


def _disagree() -> None:
    rank, mesh = dist.get_rank(), mesh_of(range(2))
    target = Target(mesh, [Replicate()])

    def state() -> dict[str, torch.Tensor | Piece]:
        return {name: on(numbers(4), mesh, Shard(0)) for name in "ab"}

    with pytest.raises(PlanError, match=r"rank 1 gives window_bytes=2, rank 0 1"):
        remesh.reshard_by_windows(state(), to=target, window_bytes=1 + rank)
    with pytest.raises(PlanError, match="both have a target for 'b'"):
        remesh.reshard_by_windows(state(), to=dict.fromkeys("ab"[: 2 - rank], target), window_bytes=1)
    with pytest.raises(OptionError, match="window_bytes"):
        remesh.reshard_by_windows(state(), to=target, window_bytes="1" if rank else 1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="there is no option"):
        remesh.reshard_by_windows(state(), to=target, window_bytes=1, **({"chunk_byte": 1} if rank else {}))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="expected more than 0"):
        remesh.reshard_by_windows(state(), to=target, window_bytes=0)
    given = state()
    with pytest.raises(PlanError, match="give is a mappingproxy"):
        remesh.reshard_by_windows(MappingProxyType(given) if rank else given, to=target, window_bytes=1)  # type: ignore[arg-type]
    assert given.keys() == {"a", "b"}


def test_what_ranks_do_not_agree_on_is_refused_by_all(ranks: RankPool) -> None:
    ranks.run(_disagree, 2)


def _lose_memory_in_the_third_window(where: str) -> tuple[str, list[str], list[str]]:
    """Rank 1 has no room for the new shards of a later window, or for its staging; then there is room again."""
    rank, mesh, names = dist.get_rank(), mesh_of(range(2)), [f"t{number}" for number in range(6)]
    wholes = {name: numbers(8, 8, seed=n) for n, name in enumerate(names)}
    give: dict[str, torch.Tensor | Piece] = {name: on(whole, mesh, Shard(0)) for name, whole in wholes.items()}
    target, came = Target(mesh, [Shard(1)]), {}
    windows = remesh.reshard_by_windows(give, to=target, window_bytes=1)
    assert len(windows) == len(names)
    real = torch.empty

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        is_staging = options.get("dtype") is torch.uint8 and isinstance(options.get("device"), torch.device)
        is_shard = options.get("dtype") is not torch.uint8 and "device" in options
        if len(came) == 2 and (is_staging if where == "staging" else is_shard):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(*size, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PlanError) as raised:
        if rank == 1:
            patch.setattr(torch, "empty", refuse)
        for made in windows:
            came |= made
    told, before = str(raised.value), (sorted(came), sorted(give))
    for made in remesh.reshard_by_windows(give, to=target, window_bytes=1):
        came |= made
    assert not give
    for name, whole in wholes.items():
        assert torch.equal(came[name].to_local(), on(whole, mesh, Shard(1)).to_local()), name
    return told, *before


@pytest.mark.parametrize("where", ["shards", "staging"])
def test_memory_that_is_gone_in_a_later_window_is_told_on_all_and_costs_nothing(ranks: RankPool, where: str) -> None:
    first, second = ranks.run(_lose_memory_in_the_third_window, 2, (where,))
    assert first == second
    told, came, left = first
    assert "rank 1" in told and "CUDA out of memory" in told
    assert ("none of them has moved" if where == "shards" else "nothing has moved") in told
    assert len(came) == 2 and sorted(came + left) == [f"t{number}" for number in range(6)]
