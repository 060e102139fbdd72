"""Resharding over gloo: every taker ends with exactly the bits that the givers had."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import remesh
from remesh.comm.gather import all_gather_json, gather_from
from remesh.foundation.errors import LayoutError, PeerError, PlanError
from remesh.layout import Box, Shard as Held, boxes_of_flat_range
from remesh.layout.from_torch import Piece
from remesh.resharding import Missing, TensorMove, compute_missing_boxes, plan_reshard
from remesh.resharding.reshard_api import Moved, gather_moves, reshard
from remesh.resharding.running import carry
from remesh.resharding.running.run import run_plan
from remesh.testbed.pool import DIED, RankPool, RanksFailed

# Bits, not values: NaN, -0.0 and numbers that no arithmetic would keep are among them.
DTYPES = [
    *["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"],
    *["bool", "int8", "int64", "complex128", "uint16"],
]


def random_bits(shape: Sequence[int], dtype: str, seed: int = 0) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = int(np.prod(shape)) * kind.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, num_bytes, dtype=np.uint8)
    return torch.tensor(bits.tolist(), dtype=torch.uint8).view(kind).reshape(tuple(shape))


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def piece(whole: torch.Tensor, boxes: Sequence[Box], fill: bool) -> Piece:
    """A flat local buffer with these boxes one after the other, filled from ``whole`` or with other bits."""
    shards, offset = [], 0
    for box in boxes:
        shards.append(Held(0, box, offset))
        offset += box.size
    buffer = torch.zeros(offset, dtype=whole.dtype)
    for shard in shards if fill else ():
        buffer[shard.offset : shard.offset + shard.box.size] = whole[shard.box.slices()].reshape(-1)
    return Piece(buffer, tuple(whole.shape), tuple(shards))


def expect(got: Piece, whole: torch.Tensor) -> None:
    wanted = piece(whole, [shard.box for shard in got.shards], fill=True)
    assert bits_of(got.tensor) == bits_of(wanted.tensor)


def mesh_of(ranks: Sequence[int], shape: Sequence[int]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(*shape), _init_backend=False)


def fill_by_placements(case: tuple[object, ...], dtype: str, shape: Sequence[int]) -> Moved:
    (src_ranks, src_mesh, src), (dst_ranks, dst_mesh, dst) = case  # type: ignore[misc]
    whole = random_bits(shape, dtype)
    give = distribute_tensor(whole.clone(), mesh_of(src_ranks, src_mesh), src, src_data_rank=None)
    take = distribute_tensor(torch.zeros_like(whole), mesh_of(dst_ranks, dst_mesh), dst, src_data_rank=None)
    moved = reshard({"x": give}, {"x": take}, chunk_bytes=64)
    wanted = distribute_tensor(whole.clone(), mesh_of(dst_ranks, dst_mesh), dst, src_data_rank=None)
    assert bits_of(take.to_local()) == bits_of(wanted.to_local())
    return moved


MESHES = {
    "identical": (([0, 1, 2, 3], [4], [Shard(0)]), ([0, 1, 2, 3], [4], [Shard(1)])),
    "identical, other shape": (([0, 1, 2, 3], [2, 2], [Shard(0), Shard(1)]), ([0, 1, 2, 3], [4], [Shard(0)])),
    "disjoint": (([0, 1], [2], [Shard(0)]), ([2, 3], [2], [Shard(1)])),
    "disjoint, uneven": (([3], [1], [Shard(0)]), ([0, 1, 2], [3], [Shard(0)])),
    "overlapping": (([0, 1, 2], [3], [Shard(0)]), ([1, 2, 3], [3], [Shard(1)])),
    "grow": (([0, 1], [2], [Shard(0)]), ([0, 1, 2, 3], [4], [Shard(0)])),
    "shrink": (([0, 1, 2, 3], [2, 2], [Replicate(), Shard(0)]), ([0, 1], [2], [Shard(0)])),
    "replicas give": (([0, 1, 2], [3], [Replicate()]), ([3], [1], [Shard(0)])),
    "replicas take": (([0], [1], [Shard(0)]), ([1, 2, 3], [3], [Replicate()])),
    "strided": (([0, 1, 2, 3], [2, 2], [_StridedShard(0, split_factor=2), Shard(0)]), ([3, 2, 1, 0], [4], [Shard(0)])),
    "in reverse": (([0, 1, 2, 3], [4], [Shard(0)]), ([3, 2, 1, 0], [4], [Shard(0)])),
}


@pytest.mark.parametrize("case", MESHES, ids=MESHES)
def test_takers_get_the_bits_of_the_givers_on_any_pair_of_meshes(ranks: RankPool, case: str) -> None:
    moved = ranks.run(fill_by_placements, 4, (MESHES[case], "float32", (9, 6)))
    assert all(each.bytes_by_pair == moved[0].bytes_by_pair for each in moved)


def fill_every_dtype() -> None:
    for dtype in DTYPES:
        fill_by_placements(MESHES["identical"], dtype, (5, 6))


def test_every_dtype_is_moved_bit_by_bit(ranks: RankPool) -> None:
    ranks.run(fill_every_dtype)


def fill_odd_shapes() -> None:
    for shape in [(), (1,), (0,), (0, 3), (3, 0), (2, 3, 4, 5), (1, 1, 7)]:
        whole = random_bits(shape, "int32")
        rank = dist.get_rank()
        everything = Box.of_shape(shape)
        give = {"x": piece(whole, [everything], fill=True)} if rank == 1 else {}
        take = {"x": piece(whole, [everything], fill=False)} if rank != 1 else {}
        reshard(give, take)
        if rank != 1:
            expect(take["x"], whole)


def test_scalars_and_empty_tensors_are_moved(ranks: RankPool) -> None:
    ranks.run(fill_odd_shapes, 3)


def fill_flat_from_columns() -> Moved:
    rank, whole = dist.get_rank(), random_bits((7, 11), "float32")
    columns = [Box((0, 3 * rank), (7, min(3 * rank + 3, 11)))]
    ends = [0, 5, 40, 40, 77]
    flat = list(boxes_of_flat_range(Box.of_shape((7, 11)), ends[rank], ends[rank + 1]))
    give, take = piece(whole, columns, fill=True), piece(whole, flat, fill=False)
    moved = reshard({"w": give}, {"w": take}, host_of={r: f"host{r}" for r in range(4)}, chunk_bytes=64)
    expect(take, whole)
    back = piece(whole, columns, fill=False)
    reshard({"w": take}, {"w": back})
    expect(back, whole)
    return moved


def test_flat_ranges_are_filled_from_columns_and_back(ranks: RankPool) -> None:
    moved = ranks.run(fill_flat_from_columns)[0]
    assert sum(moved.bytes_by_pair.values()) + moved.bytes_local == 7 * 11 * 4


def fill_state_of_many_tensors(num_tensors: int) -> Moved:
    generator = np.random.default_rng(7)
    give, take, wholes = {}, {}, {}
    two_d = mesh_of(range(4), (2, 2))
    for number in range(num_tensors):
        shape = tuple(generator.integers(1, 40, size=int(generator.integers(1, 4))).tolist())
        dtype = DTYPES[number % 5]
        whole = random_bits(shape, dtype, number)
        name = f"layer.{number}.weight"
        wholes[name] = whole
        give[name] = distribute_tensor(whole, two_d, [Shard(0), Shard(len(shape) - 1)], src_data_rank=None)
        target = mesh_of([0, 1, 2], [3]) if number % 2 else mesh_of([2, 3], [2])
        take[name] = distribute_tensor(torch.zeros_like(whole), target, [Shard(len(shape) - 1)], src_data_rank=None)
    moved = reshard(give, take, host_of={0: "a", 1: "a", 2: "b", 3: "b"})
    for name, whole in wholes.items():
        mesh = take[name].device_mesh
        wanted = distribute_tensor(whole, mesh, take[name].placements, src_data_rank=None)
        assert bits_of(take[name].to_local()) == bits_of(wanted.to_local()), name
    return moved


def test_a_state_of_many_tensors_takes_few_messages(ranks: RankPool) -> None:
    moved = ranks.run(fill_state_of_many_tensors, 4, (120,))[0]
    assert moved.num_rounds <= 12  # 120 tensors, but only as many streams as there are pairs of ranks


def fill_strided_and_packed() -> None:
    rank, whole = dist.get_rank(), random_bits((12, 4), "int16")
    # Three parts of four rows, each cut in two; a rank's buffer is the concatenation of its halves.
    packed = [Box((4 * part + 2 * rank, 0), (4 * part + 2 * rank + 2, 4)) for part in range(3)]
    transposed = torch.zeros(4, 12, dtype=torch.int16).t()
    give = piece(whole, packed, fill=True)
    take = Piece(transposed, (12, 4), (Held(0, Box.of_shape((12, 4))),))
    reshard({"qkv": give}, {"qkv": take})
    assert bits_of(transposed) == bits_of(whole)
    # The same box kept twice in one buffer is filled twice.
    twice = torch.zeros(2, 12, 4, dtype=torch.int16)
    box = Box.of_shape((12, 4))
    reshard({"qkv": give}, {"qkv": Piece(twice, (12, 4), (Held(0, box), Held(0, box, 48)))})
    assert bits_of(twice[0]) == bits_of(twice[1]) == bits_of(whole)
    # A window of a larger buffer, of which every second column is wanted.
    wide = torch.zeros(12, 8, dtype=torch.int16)
    reshard({"qkv": give}, {"qkv": Piece(wide, (12, 4), (Held(0, box, 1, (8, 2)),))})
    assert bits_of(wide[:, 1::2]) == bits_of(whole) and not wide[:, ::2].any()


def test_packed_strided_and_transposed_memory_is_filled(ranks: RankPool) -> None:
    ranks.run(fill_strided_and_packed, 2)


def rotate_in_place() -> None:
    rank, whole = dist.get_rank(), torch.arange(40.0)
    rows = torch.zeros(10)
    rows.copy_(whole[10 * rank : 10 * rank + 10])
    at, to = Box((10 * rank,), (10 * rank + 10,)), Box((10 * ((rank + 1) % 4),), (10 * ((rank + 1) % 4) + 10,))
    reshard({"x": Piece(rows, (40,), (Held(0, at),))}, {"x": Piece(rows, (40,), (Held(0, to),))}, chunk_bytes=64)
    assert torch.equal(rows, whole[to.slices()])
    # Given and taken alike, nothing is moved and nothing is spoiled.
    moved = reshard({"x": Piece(rows, (40,), (Held(0, to),))}, {"x": Piece(rows, (40,), (Held(0, to),))})
    assert torch.equal(rows, whole[to.slices()]) and not moved.bytes_by_pair


def test_memory_that_is_given_and_taken_at_once_is_not_spoiled(ranks: RankPool) -> None:
    ranks.run(rotate_in_place)


def relay_over_hosts(num_bytes: int) -> Moved:
    rank, whole = dist.get_rank(), random_bits((num_bytes,), "uint8")
    box = [Box.of_shape((num_bytes,))]
    give = {"x": piece(whole, box, fill=True)} if rank == 0 else {}
    take = {"x": piece(whole, box, fill=False)} if rank else {}
    hosts = {0: "a", 1: "b", 2: "b", 3: "c", 4: "c", 5: "d"}
    moved = reshard(give, take, host_of=hosts, chunk_bytes=4096)
    if rank:
        expect(take["x"], whole)
    return moved


def test_a_multicast_is_relayed_so_that_no_nic_carries_it_twice(ranks: RankPool) -> None:
    moved = ranks.run(relay_over_hosts, 6, (1 << 20,))[0]
    host = {0: "a", 1: "b", 2: "b", 3: "c", 4: "c", 5: "d"}
    into: dict[str, int] = {}
    out: dict[str, int] = {}
    for (giver, taker), nbytes in moved.bytes_by_pair.items():
        if host[giver] != host[taker]:
            out[host[giver]] = out.get(host[giver], 0) + nbytes
            into[host[taker]] = into.get(host[taker], 0) + nbytes
    assert into == {"b": 1 << 20, "c": 1 << 20, "d": 1 << 20}
    assert max(out.values()) == moved.lower_bound_bytes == 1 << 20


def work_in_a_subgroup() -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    whole = random_bits((8,), "float32")
    me = dist.get_rank(group)
    halves = [Box((0,), (4,)), Box((4,), (8,))]
    take = piece(whole, [halves[1 - me]], fill=False)
    moved = reshard({"x": piece(whole, [halves[me]], fill=True)}, {"x": take}, group=group)
    expect(take, whole)
    assert moved.bytes_by_pair == {(0, 1): 16, (1, 0): 16}
    dist.destroy_process_group(group)


def test_a_subgroup_counts_ranks_of_its_own(ranks: RankPool) -> None:
    ranks.run(work_in_a_subgroup)


def alike_on_all_ranks(act: Callable[[], object], kind: type[Exception]) -> str:
    """The text of the error, which must be raised on all ranks alike; the group must still work afterwards."""
    try:
        act()
    except kind as error:
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, texts
        return str(error)
    raise AssertionError("nothing was raised")


def meet_bad_input() -> list[str]:
    rank, whole = dist.get_rank(), random_bits((8, 4), "float32")
    box, low, high = Box.of_shape((8, 4)), Box((0, 0), (3, 4)), Box((5, 0), (8, 4))
    full, wanted = piece(whole, [box], fill=True), piece(whole, [box], fill=False)
    partly = piece(whole, [low] if rank == 0 else [high], fill=True)
    half = Piece(wanted.tensor.to(torch.float16), (8, 4), wanted.shards)
    narrow = Piece(torch.zeros(8), (8, 1), (Held(0, Box.of_shape((8, 1))),))
    beyond = Piece(torch.zeros(31), (8, 4), wanted.shards)
    addend = Piece(whole, (8, 4), (Held(0, box, addend=rank),), "sum")
    hosts = {0: "a", 1: "a"}
    moves = gather_moves({"w": full}, {"w": wanted})
    plan = plan_reshard(moves, hosts)
    foreign = plan_reshard([*moves, TensorMove("w2", moves[0].src, moves[0].dst)], hosts)
    nothing = plan_reshard([], hosts)
    one = {"w": wanted}
    both, both_wanted = {"w": full, "w2": full}, {"w": wanted, "w2": wanted}
    three_ranks = plan_reshard(moves, {**hosts, 2: "a"})
    acts: list[tuple[str, type[Exception], Callable[[], object]]] = [
        ("[3:5, 0:4]", PlanError, lambda: reshard({"w": partly}, {"w": wanted})),
        ("32 of 32 elements", PlanError, lambda: reshard({}, {"w": wanted})),
        ("float16", PlanError, lambda: reshard({"w": full}, {"w": half if rank else wanted})),
        ("(8, 1)", PlanError, lambda: reshard({"w": full}, {"w": narrow})),
        ("partial sums", PlanError, lambda: reshard({"w": addend}, {"w": replace(wanted, partial="sum")})),
        ("give['w'] is a int", PlanError, lambda: reshard({"w": 3 if rank else full}, {"w": wanted})),  # type: ignore[dict-item]
        ("that has 31", LayoutError, lambda: reshard({"w": full}, {"w": beyond if rank else wanted})),
        ("no host for it", PlanError, lambda: reshard({"w": partly}, {"w": partly}, host_of={0: "a"})),
        ("at least 64", PlanError, lambda: reshard({"w": full}, {"w": wanted}, chunk_bytes=1)),
        ("found 0 boxes", PlanError, lambda: run_plan(plan, {"w": full}, {})),
        ("does not move", PlanError, lambda: run_plan(nothing, {}, {"w": wanted})),
        ("found a group of 2", PlanError, lambda: run_plan(three_ranks, {"w": full}, {"w": wanted})),
        (
            "digest",
            PlanError,
            lambda: run_plan(foreign if rank else plan, both, both_wanted if rank else one),
        ),
    ]
    for told, kind, act in acts:
        text = alike_on_all_ranks(act, kind)
        assert told in text, text
    reshard({"w": full}, {"w": wanted})
    assert bits_of(wanted.tensor) == bits_of(whole)
    return [told for told, _, _ in acts]


def test_bad_input_raises_the_same_error_on_all_ranks_and_leaves_the_group_usable(ranks: RankPool) -> None:
    assert ranks.run(meet_bad_input, 2)


def leave_what_is_missing() -> None:
    rank, whole = dist.get_rank(), random_bits((8,), "float32")
    give = {"x": piece(whole, [Box((0,), (5,))], fill=True)} if rank == 0 else {}
    take = {"x": Piece(torch.full((8,), 7.0), (8,), (Held(0, Box.of_shape((8,))),))}
    moves = gather_moves(give, take)
    assert compute_missing_boxes(moves) == {"x": (Box((5,), (8,)),)}
    moved = reshard(give, take, missing=Missing.LEAVE)
    assert moved.missing == {"x": (Box((5,), (8,)),)}
    assert bits_of(take["x"].tensor[:5]) == bits_of(whole[:5]) and (take["x"].tensor[5:] == 7).all()


def test_boxes_that_nobody_holds_are_left_alone_when_asked(ranks: RankPool) -> None:
    ranks.run(leave_what_is_missing, 2)


def die_at_the_fifth(real: Any) -> Any:
    """``real``, but the process is killed when it is to run for the fifth time."""
    left = [5]

    def give(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), 9)
        return real(*args)

    return give


def lose_a_peer_on_the_way() -> str:
    rank = dist.get_rank()
    give = {"x": Piece(torch.zeros(1 << 22), (1 << 22,), (Held(0, Box.of_shape((1 << 22,))),))}
    take = {"x": Piece(torch.zeros(1 << 22), (1 << 22,), (Held(0, Box.of_shape((1 << 22,))),))}
    moves = gather_moves(give if rank == 0 else {}, take if rank else {})
    plan = plan_reshard(moves, {r: f"host{r}" for r in range(4)}, chunk_bytes=1 << 16)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(carry.Link, "give", die_at_the_fifth(carry.Link.give))
        try:
            run_plan(plan, give if rank == 0 else {}, take if rank else {})
        except PeerError as error:
            return str(error)
    return "done"


def test_a_peer_that_dies_on_the_way_ends_the_run_with_a_peer_error(ranks: RankPool) -> None:
    results = ranks.run(lose_a_peer_on_the_way, 4, dying=[2])
    assert results[2] is DIED
    assert any("meet again" in result for result in results if result is not DIED)


def wait_for_a_peer_that_stays_away() -> float:
    group = dist.new_group(timeout=timedelta(seconds=8))  # who is late to make it on a busy machine is in time
    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(PeerError, match="meet again"):
            reshard({}, {}, group=group)
    took = time.monotonic() - started
    dist.barrier()
    return took


def test_a_peer_that_stays_away_ends_the_wait_after_the_timeout_of_the_group(ranks: RankPool) -> None:
    # Not a matter of speed: other groups wait for more than ten minutes.
    assert 1 < ranks.run(wait_for_a_peer_that_stays_away, 2)[0] < 300


def run_in_batches() -> Moved:
    # What NCCL gets: the two messages of a round posted as one batch; gloo runs the same calls.
    rank, whole = dist.get_rank(), random_bits((40, 12), "float32")
    rows = [Box((10 * rank, 0), (10 * rank + 10, 12))]
    take = piece(whole, [Box.of_shape((40, 12))], fill=False)
    give = piece(whole, rows, fill=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry.Carrier, "carry", lambda self, steps, meanwhile=(): self._run_batched(steps))
        moved = reshard({"x": give}, {"x": take}, host_of={r: f"host{r}" for r in range(4)}, chunk_bytes=64)
    expect(take, whole)
    return moved


def test_batches_of_one_round_move_the_same(ranks: RankPool) -> None:
    assert ranks.run(run_in_batches)[0].num_rounds > 8


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def raise_here_and_there(kind: int) -> list[tuple[str, str]]:

    rank = dist.get_rank()
    seen = []
    errors: list[BaseException | None] = [
        remesh.FormatError("truncated", "file ends early"),
        FileNotFoundError(2, "No such file", "x.bin"),
        KeyError("weight"),
        UnicodeDecodeError("utf8", b"a", 0, 1, "bad"),
        None,
    ]
    for error in errors:
        try:
            if error is None:
                all_gather_json({1, 2} if rank == 1 else "fine")
            else:
                gather_from(partial(_raise, error if rank >= kind else None), doing="saving")
        except Exception as raised:
            seen.append((type(raised).__name__, str(raised)))
    assert all_gather_json("x" * (3000 * rank)) == ["x" * (3000 * r) for r in range(dist.get_world_size())]
    assert gather_from(partial(_raise, None)) == [None] * dist.get_world_size()
    return seen


def test_an_error_of_one_rank_is_raised_on_all_with_the_same_type_and_text(ranks: RankPool) -> None:
    results = ranks.run(raise_here_and_there, 3, (1,))
    assert results[0] == results[1] == results[2]
    assert [kind for kind, _ in results[0]] == ["FormatError", "FileNotFoundError", "KeyError", "UnicodeError", "Error"]
    assert all("rank 1" in text for _, text in results[0])


def interrupt_one_rank() -> None:

    gather_from(partial(_raise, KeyboardInterrupt() if dist.get_rank() == 1 else None), doing="saving")


def test_an_interrupt_stays_one_on_its_rank_and_is_a_lost_peer_elsewhere(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="PeerError") as raised:
        ranks.run(interrupt_one_rank, 2)
    assert "KeyboardInterrupt" in str(raised.value)
