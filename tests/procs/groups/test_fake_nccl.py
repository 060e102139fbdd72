"""Operations over NCCL that are given up raise nowhere: who moves something over it looks, and all ranks hear it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh.comm.gather import all_gather_json, gather_bytes, is_queued
from remesh.foundation.errors import PeerError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.testbed.pool import RankPool
from tests.fake_nccl import BelievedGroup, believed_group

SIDE = 8


def loses_on_rank(rank: int, name: str, number: int) -> Callable[[str, int], bool]:
    return lambda other, count: dist.get_rank() == rank and (other, count) == (name, number)


def part(whole: torch.Tensor, dim: int) -> Piece:
    """This rank's rows, or columns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start, stop = [0, 0], [SIDE, SIDE]
    start[dim], stop[dim] = rank * SIDE // size, (rank + 1) * SIDE // size
    box = Box(tuple(start), tuple(stop))
    return Piece(whole[box.slices()].contiguous(), (SIDE, SIDE), (Shard(0, box),))


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(float(SIDE * SIDE)).view(SIDE, SIDE) + 1000 * seed


def move_over_it() -> list[str]:
    with believed_group() as group:
        assert is_queued(group)
        for seed in (1, 2):
            take = part(torch.zeros(SIDE, SIDE), 1)
            remesh.reshard({"w": part(numbers(seed), 0)}, {"w": take}, group=group)
            assert torch.equal(take.tensor, part(numbers(seed), 1).tensor)
        rank = dist.get_rank()
        told = gather_bytes(torch.full((rank,), rank, dtype=torch.uint8), group)
        assert [one.tolist() for one in told] == [[each] * each for each in range(dist.get_world_size())]
        assert isinstance(group, BelievedGroup)
        return group.names


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_goes_well_over_gloo_goes_well_over_what_calls_itself_nccl(ranks: RankPool, num_ranks: int) -> None:
    ranks.run(move_over_it, num_ranks)


def tell_twice(number: int) -> str:
    """The second word of each rank differs from the first; the gather of some word is given up on rank 0."""
    with believed_group(loses_on_rank(0, "allgather", number)) as group, pytest.raises(PeerError) as raised:
        for word in ("first", "second", "third"):
            told = all_gather_json([word, dist.get_rank()], group)
            assert told == [[word, rank] for rank in range(dist.get_world_size())], "another word"
    return str(raised.value)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_gather_that_was_given_up_tells_nobody_what_the_one_before_it_told(ranks: RankPool, number: int) -> None:
    told = ranks.run(tell_twice, 2, (number,))
    assert "TIMEOUT" in told[0]


def move_what_is_lost(number: int, rank: int) -> None:
    with believed_group(loses_on_rank(rank, "recv", number)) as group:
        with pytest.raises(PeerError) as raised:
            for seed in (1, 2):
                take = part(torch.zeros(SIDE, SIDE), 1)
                remesh.reshard({"w": part(numbers(seed), 0)}, {"w": take}, group=group)
                assert torch.equal(take.tensor, part(numbers(seed), 1).tensor), "other values"
        assert "'w'" in str(raised.value), "what is not filled is named"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [1, 2])
def test_a_message_that_was_given_up_is_told_on_all_ranks(ranks: RankPool, number: int, rank: int) -> None:
    ranks.run(move_what_is_lost, 2, (number, rank))


def go_on_in_a_new_group(rank: int) -> None:
    """After a batch in the middle of a reshard has raised: a group of its operations was left open in its thread."""
    give = {name: part(numbers(1), 0) for name in "abcd"}
    take = {name: part(torch.zeros(SIDE, SIDE), 1) for name in give}
    with believed_group(loses_on_rank(rank, "recv", 2)) as group, pytest.raises(PeerError):
        remesh.reshard(give, take, group=group, chunk_bytes=64)
    move_over_it()


@pytest.mark.parametrize("rank", [0, 1])
def test_who_was_broken_off_in_a_batch_goes_on_in_a_new_group(ranks: RankPool, rank: int) -> None:
    ranks.run(go_on_in_a_new_group, 2, (rank,))


def move_by_windows() -> None:
    """What has not arrived everywhere is still held where it was."""
    names = ["a", "b", "c"]
    with believed_group(loses_on_rank(1, "recv", 2)) as group:
        give = {name: part(numbers(seed), 0) for seed, name in enumerate(names)}
        come = {}
        with pytest.raises(PeerError):
            for name in names:
                take = part(torch.zeros(SIDE, SIDE), 1)
                remesh.reshard({name: give[name]}, {name: take}, group=group)
                come[name] = take
                del give[name]
    assert sorted([*come, *give]) == names
    for seed, name in enumerate(names):
        kept, dim = (come[name], 1) if name in come else (give[name], 0)
        assert torch.equal(kept.tensor, part(numbers(seed), dim).tensor)


def test_what_did_not_arrive_everywhere_is_given_up_nowhere(ranks: RankPool) -> None:
    ranks.run(move_by_windows, 2)


def push_what_is_lost() -> None:
    with believed_group(loses_on_rank(1, "recv", 2)) as group:
        refit = remesh.Refit({"w": part(torch.zeros(SIDE, SIDE), 1)}, group=group)
        refit.push({"w": part(numbers(1), 0)}, 1)
        with pytest.raises(PeerError):
            refit.push({"w": part(numbers(2), 0)}, 2)
        with refit.read() as weights:
            seen = weights.tensors["w"]
            assert weights.version == 1 and isinstance(seen, Piece)
            assert torch.equal(seen.tensor, part(numbers(1), 1).tensor)


def test_readers_keep_the_version_before_the_one_that_was_lost(ranks: RankPool) -> None:
    ranks.run(push_what_is_lost, 2)


def move_beside_gathers() -> None:
    """The program goes on with the group while a reshard is said to be under way: one order on all ranks."""
    with believed_group() as group:
        for seed in range(5):
            take = part(torch.zeros(SIDE, SIDE), 1)
            handle = remesh.reshard_async({"w": part(numbers(seed), 0)}, {"w": take}, group=group)
            assert all_gather_json([seed, dist.get_rank()], group) == [[seed, rank] for rank in range(4)]
            handle.result()
            assert torch.equal(take.tensor, part(numbers(seed), 1).tensor)


def test_a_reshard_in_the_background_keeps_its_place_among_other_operations(ranks: RankPool) -> None:
    ranks.run(move_beside_gathers, 4)


def move_in_pairs() -> tuple[set[int], int]:
    """Ranks 0 and 2 give, 1 and 3 take; with whom this one had to do, and how many messages it queued at a time."""
    rank, batches, real = dist.get_rank(), [0], dist.batch_isend_irecv
    name, whole = f"of rank {rank // 2 * 2}", numbers(rank // 2)

    def count(ops: list[dist.P2POp]) -> list[dist.Work]:
        batches.append(len(ops))
        return real(ops)

    def piece(tensor: torch.Tensor) -> dict[str, Piece]:
        return {name: Piece(tensor, (SIDE, SIDE), (Shard(0, Box((0, 0), (SIDE, SIDE))),))}

    take = torch.zeros(SIDE, SIDE)
    with believed_group() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", count)
        sides = (piece(whole), {}) if rank % 2 == 0 else ({}, piece(take))
        remesh.reshard(*sides, group=group, chunk_bytes=64)
        assert rank % 2 == 0 or torch.equal(take, whole)
        assert isinstance(group, BelievedGroup)
        return group.peers, max(batches)


def test_messages_go_out_in_batches_to_those_who_take_alone(ranks: RankPool) -> None:
    """So there is one communicator for a group, and no pair is connected that moves no bytes."""
    told = ranks.run(move_in_pairs, 4)
    assert [peers for peers, _ in told] == [{1}, {0}, {3}, {2}]
    assert all(1 <= most <= 2 for _, most in told)
