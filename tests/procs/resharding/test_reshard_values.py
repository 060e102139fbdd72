"""Values that change on the way: casts give what ``Tensor.to`` gives, partial sums are joined in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Shard as Held
from remesh.layout.from_torch import Piece
from remesh.resharding.reshard_api import reshard
from remesh.testbed.pool import RankPool

HOSTS = {
    "one host": dict.fromkeys(range(4), "a"),
    "two hosts": {0: "a", 1: "a", 2: "b", 3: "b"},
    "four hosts": {rank: f"h{rank}" for rank in range(4)},
}


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def mesh_of(ranks: Sequence[int], shape: Sequence[int]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(*shape), _init_backend=False)


def wild_floats(size: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Floats of all magnitudes, so that the order of adding shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 6, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 2.0**exponents).to(getattr(torch, dtype))


CASTS = [
    *[("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16"), ("float16", "bfloat16")],
    *[("float32", "float8_e4m3fn"), ("float8_e5m2", "float32"), ("complex128", "complex64")],
    *[("int8", "int64"), ("uint8", "int32")],
]


def cast_on_the_way() -> None:
    for held, wanted in CASTS:
        whole = (wild_floats(66, "float32") * 3).to(getattr(torch, held)).reshape(11, 6)
        give = distribute_tensor(whole, mesh_of([0, 1, 2], [3]), [Shard(0)], src_data_rank=None)
        # Rank 2 keeps part of what it wants, and casts it in its memory; others get what travelled.
        zeros = torch.zeros(11, 6, dtype=getattr(torch, wanted))
        take = distribute_tensor(zeros, mesh_of([2, 3], [2]), [Shard(1)], src_data_rank=None)
        moved = reshard({"x": give}, {"x": take}, host_of=HOSTS["four hosts"], chunk_bytes=64)
        expected = distribute_tensor(whole.to(zeros.dtype), mesh_of([2, 3], [2]), [Shard(1)], src_data_rank=None)
        assert bits_of(take.to_local()) == bits_of(expected.to_local()), (held, wanted)
        width = min(whole.element_size(), zeros.element_size())
        kept = 3 * 3  # rank 2 holds the last three rows and wants three columns
        assert sum(moved.bytes_by_pair.values()) == (66 - kept) * width
        # The same through memory that is not contiguous.
        odd = torch.zeros(6, 11, dtype=zeros.dtype).t()
        mine = {"x": odd} if dist.get_rank() == 3 else {}
        reshard({"x": give}, mine)
        if mine:
            assert bits_of(odd) == bits_of(whole.to(zeros.dtype))


def test_casts_give_the_bits_of_to_and_the_narrower_dtype_travels(ranks: RankPool) -> None:
    ranks.run(cast_on_the_way)


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def joined(addends: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The dumb twin: whole addends, joined one after the other."""
    total = addends[0]
    for addend in addends[1:]:
        total = OPS[op](total, addend)
    return total / len(addends) if op == "avg" else total


def sum_on_the_way(hosts: str, dtype: str) -> list[int]:
    rank, size = dist.get_rank(), (10, 7)
    lengths = []
    for op in OPS:
        # Addends on both axes of a mesh, on one of them with replicas, and on two ranks.
        for ranks, shape, placements, num_addends in (
            ([0, 1, 2, 3], (2, 2), [Partial(op), Partial(op)], 4),
            ([3, 0, 1, 2], (2, 2), [Partial(op), Replicate()], 2),
            ([0, 1, 2, 3], (2, 2), [Shard(0), Partial(op)], 2),
            ([0, 1, 2], (3,), [Partial(op)], 3),
            ([1, 2], (2,), [Partial(op)], 2),
        ):
            addends = [wild_floats(70, dtype, seed).reshape(size) for seed in range(num_addends)]
            expected = joined(addends, op)
            mesh = mesh_of(ranks, shape)
            give = {}
            at = mesh.get_coordinate()
            if at is not None:
                number = 0
                for axis, placement in enumerate(placements):
                    if isinstance(placement, Partial):
                        number = number * shape[axis] + at[axis]
                local = addends[number]
                if isinstance(placements[0], Shard):
                    local = local[5 * at[0] : 5 * at[0] + 5]
                give["x"] = DTensor.from_local(local.clone(), mesh, placements, run_check=False)
            for wanted, parts in (
                (mesh_of([0, 1, 2, 3], [4]), [Shard(0)]),
                (mesh_of([3, 1], [2]), [Replicate()]),
                (mesh_of([0, 1, 2, 3], [2, 2]), [Shard(1), Replicate()]),
            ):
                take = distribute_tensor(torch.zeros(size, dtype=expected.dtype), wanted, parts, src_data_rank=None)
                moved = reshard(give, {"x": take}, host_of=HOSTS[hosts], chunk_bytes=64)
                right = distribute_tensor(expected, wanted, parts, src_data_rank=None)
                assert bits_of(take.to_local()) == bits_of(right.to_local()), (rank, op, ranks, placements, parts)
                assert moved.peak_staging_bytes <= moved.planned_staging_bytes
                lengths.append(sum(moved.bytes_by_pair.values()))
    return lengths


@pytest.mark.parametrize(
    ("hosts", "dtype"),
    [
        ("two hosts", "bfloat16"),
        pytest.param("two hosts", "float32", marks=pytest.mark.slow),
        *(pytest.param("one host", dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
        *(pytest.param("four hosts", dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
def test_partial_sums_are_joined_in_order_of_their_addends_whoever_holds_them(
    ranks: RankPool, hosts: str, dtype: str
) -> None:
    ranks.run(sum_on_the_way, 4, (hosts, dtype), timeout_s=100)


def sum_and_cast_many() -> int:
    rank = dist.get_rank()
    mesh, to = mesh_of([0, 1, 2, 3], [4]), mesh_of([2, 3], [2])
    give, take, right = {}, {}, {}
    for number in range(40):
        addends = [wild_floats(3 + 5 * number, "float32", 7 * number + each) for each in range(4)]
        name = f"t{number:02d}"
        whole = joined(addends, "sum")
        if number % 3:
            give[name] = DTensor.from_local(addends[rank], mesh, [Partial()], run_check=False)
        else:
            give[name] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        zeros = torch.zeros_like(whole, dtype=torch.bfloat16 if number % 2 else None)
        take[name] = distribute_tensor(zeros, to, [Shard(0)], src_data_rank=None)
        right[name] = distribute_tensor(whole.to(zeros.dtype), to, [Shard(0)], src_data_rank=None)
    moved = reshard(give, take)
    for name, tensor in take.items():
        assert bits_of(tensor.to_local()) == bits_of(right[name].to_local()), name
    return moved.num_rounds


def test_sums_and_casts_of_many_tensors_are_fused(ranks: RankPool) -> None:
    assert max(ranks.run(sum_and_cast_many)) < 20


def sum_integers() -> None:
    rank = dist.get_rank()
    for op, join in (("band", torch.bitwise_and), ("bxor", torch.bitwise_xor), ("sum", torch.add), ("max", torch.max)):
        addends = [torch.randint(-100, 100, (9,), generator=torch.Generator().manual_seed(n)) for n in range(3)]
        whole = Box.of_shape((9,))
        give = {"x": Piece(addends[rank], (9,), (Held(0, whole, addend=rank),), op)}
        take = {"x": torch.zeros(9, dtype=torch.int64)} if rank == 1 else {}
        reshard(give, take)
        if take:
            assert torch.equal(take["x"], join(join(addends[0], addends[1]), addends[2]))
    # One rank may hold several addends: only their sum leaves it.
    both = torch.stack([wild_floats(64, "float32", 1), wild_floats(64, "float32", 2)])
    shards = (Held(0, Box.of_shape((64,)), 0, addend=0), Held(0, Box.of_shape((64,)), 64, addend=1))
    give = {"x": Piece(both, (64,), shards, "sum")} if rank == 0 else {}
    take = {"x": torch.zeros(64)}
    moved = reshard(give, take, host_of={0: "a", 1: "b", 2: "c"})
    assert bits_of(take["x"]) == bits_of(both[0] + both[1])
    assert sum(moved.bytes_by_pair.values()) == 2 * 64 * 4


def test_integers_and_several_addends_on_a_rank_are_joined(ranks: RankPool) -> None:
    ranks.run(sum_integers, 3)


def clash() -> list[str]:
    rank = dist.get_rank()
    whole = Box.of_shape((8,))
    held = torch.ones(8)

    def addend(number: int, box: Box = whole, op: str = "sum", dtype: torch.dtype = torch.float32) -> Piece:
        return Piece(held[: box.size].to(dtype), (8,), (Held(0, box, addend=number),), op)

    half, rest = Box((0,), (5,)), Box((3,), (8,))
    acts = [
        (lambda: reshard({"w": held}, {"w": torch.zeros(8, dtype=torch.int32)}), "float32 but wanted as int32"),
        (lambda: reshard({"w": held.long()}, {"w": torch.zeros(8, dtype=torch.int32)}), "int64 but wanted as int32"),
        (lambda: reshard({"w": addend(0, half if rank else rest)}, {"w": held}), "overlap cannot be separated"),
        (lambda: reshard({"w": addend(2 * rank)}, {"w": held}), "no rank holds addend 1"),
        (lambda: reshard({"w": addend(rank, rest if rank else whole)}, {"w": held}), "has 1 of 2 addends"),
        (lambda: reshard({"w": addend(rank, op="band")}, {"w": held}), "band of float32 values is not defined"),
        (lambda: reshard({"w": addend(rank, dtype=torch.float8_e5m2)}, {"w": held}), "sum of float8_e5m2 values is"),
        (lambda: reshard({"w": addend(rank, op="max" if rank else "min")}, {"w": held}), "reduction min"),
        (lambda: reshard({"w": held}, {"w": addend(0)}), "requested as partial sums"),
        (lambda: reshard({"w": addend(rank, half)}, {"w": held}), "3 of 8 elements"),
    ]
    texts = []
    for act, told in acts:
        with pytest.raises(PlanError) as raised:
            act()
        assert told in str(raised.value), str(raised.value)
        texts.append(str(raised.value))
    return texts


def test_values_that_cannot_be_cast_or_joined_are_refused_alike_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(clash, 2)
    assert first == second


def tie_on_one_rank() -> str:
    """Rank 1 has one tensor for both names; the group is as good as before afterwards."""
    rank = dist.get_rank()
    tied = torch.zeros(64)
    take = {"a": tied, "b": tied} if rank == 1 else {"a": torch.zeros(64), "b": torch.zeros(64)} if rank == 2 else {}
    first, second = wild_floats(64, "float32", 1), wild_floats(64, "float32", 2)
    with pytest.raises(PlanError) as raised:
        reshard({"a": first, "b": second} if rank == 0 else {}, take)
    reshard({"a": second, "b": second.clone()} if rank == 0 else {}, take)
    assert all(bits_of(one) == bits_of(second) for one in take.values())
    return str(raised.value)


def test_what_one_rank_takes_into_one_memory_with_two_values_is_an_error_on_all(ranks: RankPool) -> None:
    told = ranks.run(tie_on_one_rank)
    assert "tensors 'a' are not what was given for them" in told[1]
    assert all("on another rank some tensors are not what was given" in text for at, text in enumerate(told) if at != 1)
