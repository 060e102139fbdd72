"""Runs that repeat, overlap with compute, keep to their memory, tell what they did, and survive a lost peer."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from remesh.comm import gather as exchange, word_tree
from remesh.comm.word_tree import Farewell, PeerWait
from remesh.foundation.errors import PeerError, PlanError
from remesh.resharding.refit import Refit
from remesh.resharding.reshard_api import reshard, reshard_async
from remesh.resharding.running import cache
from remesh.resharding.running.cache import Resharder
from remesh.resharding.running.carry import Link
from remesh.resharding.running.run import Moved, UnfilledError, gather_timings
from remesh.testbed.pool import DIED, RankPool

HOSTS = {rank: f"h{rank}" for rank in range(4)}


def mesh_of(ranks: list[int], *shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape or (len(ranks),)), _init_backend=False)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape).astype("float32"))


def on(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def repeat_with_one_plan() -> list[tuple[int, int]]:
    planned = []
    plan_stacked = cache.plan_stacked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_planned", {})
        patch.setattr(cache, "plan_stacked", lambda *args: planned.append(1) or plan_stacked(*args))  # type: ignore[func-returns-value]
        resharder = Resharder(host_of=HOSTS)
        rows, columns = mesh_of([0, 1, 2]), mesh_of([1, 2, 3])
        give = {"a": on(numbers(12, 9), rows, Shard(0)), "b": on(numbers(40), rows, Shard(0))}
        odd = torch.zeros(9, 12).t()
        take: dict[str, torch.Tensor] = {"a": odd, "b": on(torch.zeros(40), columns, Shard(0))}
        counts = []

        def go(seed: int, give: dict[str, DTensor], take: dict[str, torch.Tensor]) -> None:
            for tensor in give.values():
                tensor.copy_(on(numbers(*tensor.shape, seed=seed), rows, Shard(0)))
            resharder.reshard(give, take)
            for name, tensor in take.items():
                whole = numbers(*tensor.shape, seed=seed)
                right = on(whole, columns, Shard(0)).to_local() if isinstance(tensor, DTensor) else whole
                assert torch.equal(tensor.to_local() if isinstance(tensor, DTensor) else tensor, right), name
            counts.append((resharder.num_planned, resharder.num_reused))

        for seed in (1, 2, 3):
            go(seed, give, take)
        # Other tensors of the same layouts, on one rank only: the plan stays, the memory is looked up anew.
        if dist.get_rank() == 2:
            take = {"a": torch.zeros(12, 9), "b": on(torch.zeros(40), columns, Shard(0))}
        go(4, give, take)
        go(5, dict(give), dict(take))
        # Other layouts need another plan; the first one is not forgotten.
        go(6, {"a": give["a"]}, {"a": take["a"]})
        go(7, give, take)
        assert len(planned) == 2
        return counts


def test_a_repeated_call_plans_nothing_and_moves_what_is_there_now(ranks: RankPool) -> None:
    counts = ranks.run(repeat_with_one_plan)
    assert counts[0] == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (2, 5)]
    assert all(each == counts[0] for each in counts)


def call_alike_many_times() -> list[int]:
    """How often was planned up to each of these calls?"""
    planned: list[int] = []
    plan_stacked = cache.plan_stacked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_planned", {})
        patch.setattr(cache, "plan_stacked", lambda *args: planned.append(1) or plan_stacked(*args))  # type: ignore[func-returns-value]
        counts = []

        def go(seed: int, size: int = 12, **options: Any) -> None:
            whole = numbers(size, 9, seed=seed)
            take = {"a": on(torch.zeros(size, 9), mesh_of([1, 2, 3]), Shard(1))}
            reshard({"a": on(whole, mesh_of([0, 1, 2]), Shard(0))}, take, **options)
            assert torch.equal(take["a"].to_local(), on(whole, mesh_of([1, 2, 3]), Shard(1)).to_local())
            counts.append(len(planned))

        for seed in (1, 2):
            go(seed)
        go(3, chunk_bytes=64)  # other options are another plan
        go(4)
        for size in range(13, 13 + cache._MAX_PLANNED):
            go(5, size)
        assert len(cache._planned) == cache._MAX_PLANNED
        go(6)  # the oldest is forgotten
        patch.setattr(cache, "_MAX_MESSAGES", 0)
        go(7, 40)
        go(8, 40)
        return counts


def test_calls_alike_plan_once_whatever_tensors_they_are_of(ranks: RankPool) -> None:
    for counts in ranks.run(call_alike_many_times):
        assert counts == [1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9]


COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "barrier", "broadcast", "gather")


def count_what_ranks_wait_for() -> dict[str, Counter[str]]:
    """By call: how often words went through the tree, farewells, and collectives of the backend."""
    counted: Counter[str] = Counter()

    def count(what: str, real: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            counted[what] += 1
            return real(*args, **kwargs)

        return act

    def what(act: Callable[[], object]) -> Counter[str]:
        counted.clear()
        act()
        return Counter(counted)

    mesh, target = mesh_of([0, 1, 2, 3]), mesh_of([2, 1])
    give = {f"t{n}": on(numbers(64 + n, 8, seed=n), mesh, Shard(0)) for n in range(30)}
    take = {name: on(torch.zeros(held.shape), target, Shard(1)) for name, held in give.items()}
    few = ({"t0": give["t0"]}, {"t0": take["t0"]})
    resharder, refit = Resharder(), Refit(take)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "gather_words", count("words", exchange.gather_words))
        patch.setattr(Farewell, "wait", count("farewell", Farewell.wait))
        for name in COLLECTIVES:
            patch.setattr(dist, name, count("collective", getattr(dist, name)))
        return {
            "first": what(lambda: resharder.reshard(give, take)),
            "again": what(lambda: resharder.reshard(give, take)),
            "small": what(lambda: reshard(*few)),
            "refit": what(lambda: refit.push(give, 1)),
            "refit to the other buffer": what(lambda: refit.push(give, 2)),
            "refit again": what(lambda: refit.push(give, 3)),
        }


def test_a_repeated_call_waits_for_others_twice_and_never_for_a_collective(ranks: RankPool) -> None:
    for counts in ranks.run(count_what_ranks_wait_for):
        # Descriptions of so many kinds are long, so a collective carries them; then one word to agree, one to end.
        assert counts["first"] == counts["refit"] == {"words": 2, "collective": 1, "farewell": 1}
        assert counts["small"] == {"words": 2, "farewell": 1}
        assert counts["refit to the other buffer"] == {"words": 2, "farewell": 1}
        assert counts["again"] == counts["refit again"] == {"words": 1, "farewell": 1}


def agree_in_a_deep_tree() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_tree, "_FAN_OUT", 2)
        words = [bytes([each]) * (300 * each) for each in range(size)]
        assert word_tree.gather_words(words[rank], 300 * size, None, PeerWait("", rank, 0.0)) == words
        take = torch.zeros(50)
        reshard({"x": numbers(50)} if rank == 1 else {}, {"x": take})
        assert torch.equal(take, numbers(50))
        with pytest.raises(PlanError, match="held by no rank"):
            reshard({}, {"x": take} if rank == size - 1 else {})


def test_words_reach_everybody_through_a_deep_tree(ranks: RankPool) -> None:
    ranks.run(agree_in_a_deep_tree, 7)


def move_while_computing() -> float:
    rank = dist.get_rank()
    give = {"x": numbers(1 << 20)} if rank == 0 else {}
    take = {"x": torch.zeros(1 << 20)} if rank else {}
    first = reshard_async(give, take, host_of=HOSTS)
    assert first.wait(0) in (True, False)
    # The group is free for collectives, and for another reshard, while bytes move.
    others = {"y": torch.full((64,), float(rank))}
    second = reshard_async({"y": others["y"]} if rank == 3 else {}, {"y": others["y"]} if rank != 3 else {})
    total = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(total, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.MAX)
    moved = first.result()
    assert first.is_done and first.wait() and first.result() is moved
    second.result()
    assert (others["y"] == 3).all()
    assert rank == 0 or torch.equal(take["x"], numbers(1 << 20))
    return moved.seconds


def test_a_handle_lets_compute_and_collectives_go_on(ranks: RankPool) -> None:
    assert all(seconds > 0 for seconds in ranks.run(move_while_computing))


def wait_for_one_who_is_late() -> str:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        real = Link.give

        def give(*args: Any) -> Any:
            store.wait(["the other has lost its patience"], timedelta(seconds=100))
            return real(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "give", give)
            reshard_async({"x": torch.ones(4)}, {}).result()
        return ""
    handle = reshard_async({}, {"x": torch.zeros(4)})
    with pytest.raises(TimeoutError) as raised:
        handle.result(timeout_s=0.01)
    store.set("the other has lost its patience", "")
    handle.result()
    return str(raised.value)


def test_a_timeout_of_a_handle_leaves_the_run_under_way(ranks: RankPool) -> None:
    assert "1 tensors: not done" in ranks.run(wait_for_one_who_is_late, 2)[1]


def move_within(cap: int | None) -> Moved:
    rank = dist.get_rank()
    shape = (1 << 9, 1 << 9)
    whole = numbers(*shape)
    rows = mesh_of([0, 1, 2, 3])
    give = {"x": on(whole, rows, Shard(0)), "y": on(whole.bfloat16(), rows, Shard(1))}
    take = {"x": on(torch.zeros(shape), rows, Shard(1)), "y": on(torch.zeros(shape), mesh_of([1, 2]), Replicate())}
    moved = reshard(give, take, host_of=HOSTS, **({} if cap is None else {"max_staging_bytes": cap}))  # type: ignore[typeddict-item]
    assert torch.equal(take["x"].to_local(), on(whole, rows, Shard(1)).to_local())
    assert rank not in (1, 2) or torch.equal(take["y"].to_local(), whole.bfloat16().float())
    return moved


@pytest.mark.parametrize("cap", [None, 1 << 18, 1 << 16, 3 << 14])
def test_measured_staging_stays_below_the_planned_and_the_planned_below_the_cap(ranks: RankPool, cap: int) -> None:
    moved = ranks.run(move_within, 4, (cap,))
    assert all(0 < each.peak_staging_bytes <= each.planned_staging_bytes for each in moved)
    if cap is not None:
        assert all(each.planned_staging_bytes <= cap for each in moved)


def exceed_caps() -> list[str]:
    rank = dist.get_rank()
    texts = []
    whole = numbers(64, 64)
    give = {"x": whole} if rank == 0 else {}
    transposed = torch.zeros(64, 64).t()
    for options, take, told in (
        ({"max_staging_bytes": 8}, torch.zeros(64, 64), "max_staging_bytes is 8, too small for"),
        ({"max_staging_bytes": 5000, "chunk_bytes": 1 << 16}, torch.zeros(64, 64), "too small for"),
        ({"max_staging_bytes": 9000}, transposed, "must copy 1 of them whole"),
    ):
        with pytest.raises(PlanError) as raised:
            reshard(give, {"x": take} if rank else {}, **options)  # type: ignore[arg-type]
        assert told in str(raised.value), str(raised.value)
        texts.append(str(raised.value))
    reshard(give, {"x": transposed} if rank else {}, max_staging_bytes=1 << 16)
    assert rank == 0 or torch.equal(transposed, whole)
    return texts


def test_a_cap_that_is_too_small_is_refused_before_any_byte(ranks: RankPool) -> None:
    first, second = ranks.run(exceed_caps, 2)
    assert first == second


def time_messages() -> tuple[Any, ...]:
    rank = dist.get_rank()
    mesh = mesh_of([0, 1, 2, 3])
    addends = DTensor.from_local(numbers(4096, seed=rank), mesh, [Partial()], run_check=False)
    give = {"s": addends, "x": on(numbers(1 << 14), mesh, Shard(0))}
    take = {"s": on(torch.zeros(4096), mesh, Shard(0)), "x": on(torch.zeros(1 << 14), mesh, Replicate())}
    moved = reshard(give, take, host_of=HOSTS, chunk_bytes=4096)
    timings = gather_timings(moved)
    by_pair: dict[tuple[int, int], int] = {}
    for each in timings:
        assert 0 <= each.start_s <= each.finish_s
        by_pair[each.giver, each.taker] = by_pair.get((each.giver, each.taker), 0) + each.nbytes
    assert by_pair == moved.bytes_by_pair
    assert {each.stage for each in timings} == {0, 1}
    assert len({(each.stage, each.round, each.giver) for each in timings}) == len(timings)
    return timings


def test_every_message_is_timed_once_and_all_ranks_get_the_same_list(ranks: RankPool) -> None:
    told = ranks.run(time_messages)
    assert told[0] and all(each == told[0] for each in told)


def die_at_message(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let this process end itself where it begins to send or receive its message of that number."""
    left = [count]

    def counted(real: Any) -> Any:
        def act(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), 9)
            return real(*args)

        return act

    for name in ("give", "post"):
        patch.setattr(Link, name, counted(getattr(Link, name)))


def lose_a_peer_and_go_on(dying: int, survivors: list[int]) -> Any:
    rank, size = dist.get_rank(), 1 << 20
    wholes = {"alone": numbers(size, seed=3), "x": numbers(size), "y": numbers(size, seed=4)}
    # Ranks 0 and 1 are replicas of two tensors, the third is with rank 0 alone; 2 and 3 want everything.
    give = {name: wholes[name].clone() for name in ([["alone", "x", "y"], ["x", "y"], [], []][rank])}
    take = {name: torch.zeros(size) for name in (wholes if rank in (2, 3) else ())}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UnfilledError) as raised:
        if rank == dying:
            die_at_message(9, patch)
        reshard(give, take, host_of=HOSTS, chunk_bytes=1 << 16)
    unfilled = raised.value.unfilled
    assert isinstance(raised.value, PeerError) and "meet again in a new one" in str(raised.value)
    assert all(repr(name) in str(raised.value) for name in unfilled)
    filled = take.keys() - set(unfilled)
    assert all(torch.equal(take[name], wholes[name]) for name in filled)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("after", store),
        rank=survivors.index(rank),
        world_size=len(survivors),
        timeout=timedelta(seconds=100),
    )
    # Givers that are left give again; a taker wants only what it has not, and may give what it has.
    refused = ""
    try:
        reshard(give | {name: take[name] for name in filled}, {name: take[name] for name in unfilled})
    except PlanError as error:
        refused = str(error)
    assert refused or all(torch.equal(take[name], wholes[name]) for name in take)
    return unfilled, refused


@pytest.mark.parametrize("dying", [1, 0, 2])
def test_a_peer_that_dies_ends_the_run_for_all_at_once_and_the_rest_completes_without_it(
    ranks: RankPool, dying: int
) -> None:
    survivors = [rank for rank in range(4) if rank != dying]
    # A rank that waits for the timeout of its group is stuck by then: the run has a shorter one.
    results = ranks.run(lose_a_peer_and_go_on, 4, (dying, survivors), dying=[dying])
    assert results[dying] is DIED
    told = [results[rank] for rank in survivors]
    if dying == 0:  # one tensor went with it: that is told, on all ranks alike
        assert "'alone'" in told[0][1] and "held by no rank" in told[0][1]
        assert len({refused for _, refused in told}) == 1
    else:
        assert not any(refused for _, refused in told)
    if dying in (0, 1):
        assert any(unfilled for unfilled, _ in told)


def lose_a_peer_at_the_end(dying: int, folder: str) -> tuple[str, tuple[str, ...]]:
    """The peer goes when every rank has all that it wanted: before, it takes with it what others have not read yet."""
    rank, at_the_end = dist.get_rank(), Path(folder)
    give = {"x": numbers(1 << 12)} if rank == 0 else {}
    take = {"x": torch.zeros(1 << 12)} if rank else {}
    real = Farewell.wait

    def wait(farewell: Farewell, trouble: bool = False) -> bool:
        (at_the_end / str(rank)).touch()
        while rank == dying and len(list(at_the_end.iterdir())) < dist.get_world_size():
            time.sleep(0.001)
        if rank == dying:
            os.kill(os.getpid(), 9)
        return real(farewell, trouble)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UnfilledError) as raised:
        patch.setattr(Farewell, "wait", wait)
        reshard(give, take)
    assert rank == 0 or torch.equal(take["x"], numbers(1 << 12))
    return str(raised.value), raised.value.unfilled


@pytest.mark.parametrize("dying", [3, 1])  # who is asked last, and one of those who ask
def test_a_peer_that_dies_before_its_last_word_is_missed_by_all(ranks: RankPool, tmp_path: Path, dying: int) -> None:
    results = ranks.run(lose_a_peer_at_the_end, 4, (dying, str(tmp_path)), dying=[dying])
    assert results[dying] is DIED
    for text, unfilled in (result for result in results if result is not DIED):
        assert "all tensors that this rank wanted are filled" in text and not unfilled
