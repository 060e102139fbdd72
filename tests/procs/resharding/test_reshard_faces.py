"""The faces of resharding: targets, one DTensor, one buffer, and refits that readers see whole or not at all."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import remesh
from remesh.foundation.errors import PeerError, PlanError
from remesh.layout import Box, Shard as Held
from remesh.layout.from_torch import Piece
from remesh.resharding import Refit, Target, redistribute_across, reshard_tensor
from remesh.resharding.running.carry import Link
from remesh.testbed.pool import RankPool
from tests.procs.resharding.test_reshard import die_at_the_fifth
from tests.profiles import so_many


def mesh_of(ranks: Sequence[int], *shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape or (len(ranks),)), _init_backend=False)


def on(whole: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def move_a_state_to_targets() -> None:
    rank = dist.get_rank()
    source, line, grid = mesh_of([0, 1, 2]), mesh_of([3, 2]), mesh_of([0, 1, 2, 3], 2, 2)
    wholes = {"a": numbers(7, 6), "b": numbers(5, seed=1), "c": numbers(4, 4, seed=2)}
    # Ranks outside the source mesh may hold the state without elements, or not at all.
    state = {name: on(whole, source, Shard(0)) for name, whole in wholes.items()} if rank != 3 else {}
    moved = remesh.reshard(state, to=Target(line, [Shard(-1)])).made
    assert moved.keys() == wholes.keys()
    for name, tensor in moved.items():
        assert tensor.device_mesh == line and tensor.shape == wholes[name].shape
        assert tensor.placements == (Shard(wholes[name].ndim - 1),)
        assert torch.equal(tensor.to_local(), on(wholes[name], line, *tensor.placements).to_local())
    targets = {"a": Target(grid, [Shard(0), Shard(1)]), "b": Target(grid, [Replicate(), Shard(0)], torch.bfloat16)}
    moved = remesh.reshard(state, to=targets, chunk_bytes=64).made
    assert moved.keys() == targets.keys() and moved["b"].dtype == torch.bfloat16
    for name, tensor in moved.items():
        right = on(wholes[name].to(tensor.dtype), grid, *targets[name].placements)
        assert torch.equal(tensor.to_local(), right.to_local())
    with pytest.raises(PlanError, match="'z'.*no rank gives"):
        remesh.reshard(state, to={"z": Target(line, [Shard(0)])})
    with pytest.raises(PlanError, match="both of take and to"):
        remesh.reshard(state, state, to=targets)  # type: ignore[call-overload]


def test_a_state_is_moved_to_new_tensors_on_its_targets(ranks: RankPool) -> None:
    ranks.run(move_a_state_to_targets)


PLACEMENTS: list[list[Placement]] = [[Replicate()], [Shard(0)], [Shard(1)]]
MESHES = [[3, 0, 1, 2], [2, 1], [2, 3, 1]][: so_many(3, quick=2)]


def redistribute_everywhere() -> None:
    whole = numbers(5, 6)
    for src, dst in itertools.product(MESHES, repeat=2):
        for before, after in itertools.product(PLACEMENTS, repeat=2):
            tensor = on(whole, mesh_of(src), *before)
            got = redistribute_across(tensor, mesh_of(dst), after)
            assert torch.equal(got.to_local(), on(whole, mesh_of(dst), *after).to_local()), (src, dst, before, after)
            assert got.device_mesh == mesh_of(dst) and got.placements == tuple(after)
    rank = dist.get_rank()
    addends = DTensor.from_local(numbers(8, seed=rank), mesh_of([0, 1, 2, 3]), [Partial()], run_check=False)
    got = redistribute_across(addends, mesh_of([2, 0]), [Shard(0)], dtype=torch.float64)
    total = sum((numbers(8, seed=n) for n in range(1, 4)), numbers(8, seed=0))
    assert torch.equal(got.to_local(), on(total.double(), mesh_of([2, 0]), Shard(0)).to_local())


def test_a_dtensor_goes_to_any_other_mesh(ranks: RankPool) -> None:
    ranks.run(redistribute_everywhere, timeout_s=100)


def move_a_buffer() -> None:
    rank = dist.get_rank()
    whole = numbers(7, 6)
    # As in the RFC: a rank's role follows from the meshes. Rank 0 gives, 1 gives and takes, 2 and 3 take.
    src, dst = mesh_of([0, 1]), mesh_of([1, 2, 3])
    before, after = on(whole, src, Shard(0)).to_local(), on(whole, dst, Shard(1)).to_local()
    buf = torch.full((before.numel() + after.numel(),), -1.0)
    buf[: before.numel()] = before.reshape(-1)
    reshard_tensor(buf, src, [Shard(0)], dst, [Shard(-1)], src_local_shape=before.shape, dst_local_shape=after.shape)
    if rank == 0:
        assert torch.equal(buf[: before.numel()], before.reshape(-1))
    else:
        assert torch.equal(buf[: after.numel()].view(after.shape), after)
    # Shapes may be left out where they are those of the buffer.
    buf = before.clone() if rank < 2 else torch.zeros(whole.shape)
    reshard_tensor(buf, src, [Shard(0)], mesh_of([2, 3]), [Replicate()])
    assert rank < 2 or torch.equal(buf, whole)
    with pytest.raises(PlanError, match=r"has 3 elements.*expected 6"):
        reshard_tensor(torch.zeros(3), src, [Shard(0)], dst, [Shard(0)], src_local_shape=(6,), dst_local_shape=(4,))
    with pytest.raises(PlanError, match=r"global shape \(9,\)"):
        reshard_tensor(torch.zeros(3 + 3 * rank), src, [Shard(0)], src, [Shard(0)])


def move_a_scalar_to_some_ranks() -> None:
    """Torch tells a rank outside the mesh that its tensor has the shape (0,)."""
    rank, some, others = dist.get_rank(), mesh_of([0]), mesh_of([1, 2])
    give = {"t": on(torch.tensor(7.0), some, Replicate())} if rank == 0 else {}
    to = Target(others, [Replicate()])
    made = remesh.reshard(give, to=to).made["t"]
    refit = Refit({"t": on(torch.tensor(0.0), others, Replicate())})
    for version in (1, 2):
        refit.push(give, version if rank == 0 else None)
    with refit.read() as snapshot:
        for got in (made, snapshot.tensors["t"]):
            assert isinstance(got, DTensor) and got.shape == ()
            assert rank not in (1, 2) or float(got.to_local()) == 7.0


def test_a_scalar_goes_to_some_of_the_ranks(ranks: RankPool) -> None:
    ranks.run(move_a_scalar_to_some_ranks, 3)


def test_a_buffer_is_read_in_one_layout_and_written_in_the_other(ranks: RankPool) -> None:
    ranks.run(move_a_buffer)


def state_of(version: int) -> dict[str, torch.Tensor]:
    return {"w": numbers(64, 48, seed=version), "b": numbers(48, seed=1000 + version)}


def refit_while_reading() -> list[int | None]:
    rank = dist.get_rank()
    trainers, generators = mesh_of([0, 1]), mesh_of([2, 3])
    trains = rank < 2
    take = {} if trains else {name: on(torch.zeros_like(t), generators, Shard(0)) for name, t in state_of(0).items()}
    refit = Refit(take, chunk_bytes=512)
    seen: list[int | None] = [refit.version]
    done, broken = threading.Event(), []

    def keep_reading() -> None:
        while not done.is_set():
            with refit.read() as snapshot:
                for name, whole in state_of(snapshot.version).items():
                    mine = snapshot.tensors[name]
                    assert isinstance(mine, DTensor)
                    if not torch.equal(mine.to_local(), on(whole, generators, Shard(0)).to_local()):
                        broken.append((name, snapshot.version))

    reader = threading.Thread(target=keep_reading, daemon=True)
    for version in range(1, 8):
        give = {name: on(t, trainers, Shard(0)) for name, t in state_of(version).items()} if trains else None
        if version % 2:
            refit.push(give, version if trains else None)
        else:
            handle = refit.start(give, version if trains else None)
            assert handle.version == version and refit.version == version - 1
            handle.result()
            assert handle.is_done
        seen.append(refit.version)
        if version == 1 and not trains:
            reader.start()
    done.set()
    if not trains:
        reader.join(100)
        assert not reader.is_alive() and not broken, broken
    assert refit.num_planned == 1  # the two buffers have one plan
    return seen


def test_readers_see_whole_versions_only_while_new_ones_arrive(ranks: RankPool) -> None:
    assert all(seen == [None, *range(1, 8)] for seen in ranks.run(refit_while_reading, timeout_s=90))


def misuse_a_refit() -> list[str]:
    rank = dist.get_rank()
    whole = Box.of_shape((4,))
    take = {} if rank == 0 else {"w": Piece(torch.zeros(4), (4,), (Held(0, whole),))}
    refit = Refit(take, readers_timeout_s=0.2)
    texts = []
    if rank:
        with pytest.raises(PlanError, match="no version has arrived"), refit.read():
            pass
    give = {"w": torch.ones(4)} if rank == 0 else {}
    for versions, told in (((None, None, None), "expected one version"), ((1, 2, None), "expected one version")):
        with pytest.raises(PlanError, match=told) as raised:
            refit.push(give, versions[rank])
        texts.append(str(raised.value))
    refit.push(give, 1 if rank == 0 else None)
    with refit.read() if rank else open(os.devnull) as held:
        refit.push({"w": torch.full((4,), 2.0)} if rank == 0 else {}, 2 if rank == 0 else None)
        # The buffer of version 1 is still held: version 3 has no place to go.
        with pytest.raises(PeerError, match="leave `read") as late:
            refit.push(give, 3 if rank == 0 else None)
        texts.append(str(late.value))
        if rank:
            tensor = held.tensors["w"].tensor  # type: ignore[union-attr]
            assert held.version == 1 and torch.equal(tensor, torch.ones(4))  # type: ignore[union-attr]
    refit.push({"w": torch.full((4,), 4.0)} if rank == 0 else {}, 4 if rank == 0 else None)
    if rank:
        with refit.read() as snapshot:
            assert snapshot.version == 4 and (snapshot.tensors["w"].tensor == 4).all()  # type: ignore[union-attr]
    return texts


def test_versions_must_agree_and_readers_must_let_go(ranks: RankPool) -> None:
    first, *others = ranks.run(misuse_a_refit, 3)
    assert all(each == first for each in others)


def refit_with_changing_members() -> list[int | None]:
    rank = dist.get_rank()
    generators = mesh_of([1, 2, 3])
    few, all_ranks = dist.new_group([0, 1, 2]), dist.group.WORLD
    wholes = state_of(0)
    # A generator is a replica that takes everything: members come and go without changing each other's layout.
    take: dict[str, Any] = {} if rank == 0 else {name: torch.zeros_like(t) for name, t in wholes.items()}
    refit = Refit(take, group=few)
    seen: list[int | None] = []

    def push(version: int) -> None:
        refit.push(state_of(version) if rank == 0 else {}, version if rank == 0 else None)
        seen.append(refit.version)
        if rank:
            with refit.read() as snapshot:
                assert all(torch.equal(snapshot.tensors[n], t) for n, t in state_of(version).items())  # type: ignore[arg-type]

    if rank != 3:
        push(1)
        push(2)
    refit.regroup(all_ranks)  # rank 3 joins
    push(3)
    push(4)
    refit.regroup(few)  # and leaves
    if rank != 3:
        push(5)
    assert generators.size() == 3
    return seen


def test_members_of_a_refit_join_and_leave(ranks: RankPool) -> None:
    seen = ranks.run(refit_with_changing_members)
    assert seen[:3] == [[1, 2, 3, 4, 5]] * 3 and seen[3] == [3, 4]


def lose_a_trainer() -> Any:
    rank = dist.get_rank()
    wholes = {"w": numbers(1 << 19)}
    take = {} if rank < 2 else {"w": torch.zeros(1 << 19)}
    refit = Refit(take, chunk_bytes=1 << 15, host_of={n: f"h{n}" for n in range(4)})
    refit.push(wholes if rank < 2 else {}, 1 if rank < 2 else None)
    with pytest.raises(PeerError), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Link, "give", die_at_the_fifth(Link.give))
        refit.push({"w": wholes["w"] + 1} if rank < 2 else {}, 2 if rank < 2 else None)
    assert refit.version == 1
    if rank > 1:
        with refit.read() as snapshot:
            assert snapshot.version == 1 and torch.equal(snapshot.tensors["w"], wholes["w"])  # type: ignore[arg-type]
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    survivors = [0, 2, 3]
    dist.init_process_group("gloo", store=dist.PrefixStore("after", store), rank=survivors.index(rank), world_size=3)
    refit.regroup(host_of={n: f"h{n}" for n in range(3)})
    refit.push({"w": wholes["w"] + 2} if rank < 2 else {}, 3 if rank < 2 else None)
    if rank > 1:
        with refit.read() as snapshot:
            assert snapshot.version == 3 and torch.equal(snapshot.tensors["w"], wholes["w"] + 2)  # type: ignore[arg-type]
    return refit.version


def test_a_lost_trainer_leaves_readers_with_the_version_before(ranks: RankPool) -> None:
    assert [v for v in ranks.run(lose_a_trainer, 4, dying=[1]) if isinstance(v, int)] == [3, 3, 3]
