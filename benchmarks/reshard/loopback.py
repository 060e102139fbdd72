"""Overhead of a run beside plain messages of the same bytes: four ranks on one machine, gloo over loopback.

The peer posts one isend and one irecv per pair of ranks, of contiguous bytes, as many as the plan moves. On one
machine every byte also passes through the processor, so packing strided memory shows; between machines it hides
behind the network. The ranks are planned as what they are, on one host, and for comparison as if each had a host of
its own: then chunks are short, as links want them, and each costs a wake-up. What ranks agree on before and after a
run takes as long for one element as for all: a run of one element is measured beside the others. Runs and peers take
turns, and their medians count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.report import Row, at_least, at_most
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.resharding import plan_reshard
from remesh.resharding.planning.plan import Plan
from remesh.resharding.reshard_api import gather_moves, reshard
from remesh.resharding.running.cache import Resharder
from remesh.resharding.running.run import run_plan
from remesh.testbed.pool import RankPool

NUM_RANKS = 4
Pieces = dict[str, Piece]


def large_tensor(num_rows: int, repeat: int) -> tuple[float, ...]:
    """Seconds of rows to columns: the run, one for four hosts, plain messages, packed by hand, a run of few bytes."""
    give, take = _rows("x", num_rows, 1024), _columns("x", num_rows, 1024)
    runs, plan = _runs(give, take)
    by_hand = _packed_by_hand(give["x"].tensor, take["x"].tensor)
    return _in_turn([*runs, _plain(plan.bytes_by_pair), by_hand, _least_run()], repeat)


def large_multicast(num_rows: int, repeat: int) -> tuple[float, ...]:
    """The same for one matrix from rank 0 to all others, which plain messages send three times from rank 0."""
    whole = Box((0, 0), (num_rows, 1024))
    rank = dist.get_rank()
    give = {"x": _piece(whole, whole)} if rank == 0 else {}
    take = {"x": _piece(whole, whole)} if rank else {}
    runs, plan = _runs(give, take)
    direct = {(0, taker): whole.size * 4 for taker in range(1, NUM_RANKS)}
    by_hand = _passed_on_by_hand((give or take)["x"].tensor, len(plan.chunks))
    return _in_turn([*runs, _plain(direct), by_hand, _least_run()], repeat)


def _runs(give: Pieces, take: Pieces) -> tuple[list[Callable[[], object]], Plan]:
    """Runs of the move as planned for one host, and for a host for each rank; the plan of the former."""
    moves = gather_moves(give, take)
    here, apart = (
        plan_reshard(moves, hosts) for hosts in (_hosts(), {rank: f"host{rank}" for rank in range(NUM_RANKS)})
    )
    return [lambda: run_plan(here, give, take), lambda: run_plan(apart, give, take)], here


@dataclass(frozen=True, slots=True)
class StateTimes:
    """Seconds that a state of many small tensors takes."""

    together: float
    """In one reshard, description and plan included."""
    again: float
    """The same when its plan is kept."""
    by_hand: float
    """Written for these two layouts: one message to each other rank, packed and unpacked tensor by tensor."""
    one_by_one: float
    planning: float
    """Gathering and planning alone."""
    processor: float
    """Of one rank's main thread, in one reshard."""


def state(num_tensors: int, repeat: int) -> StateTimes:
    """A state of many small tensors, rows to columns."""
    give: Pieces = {}
    take: Pieces = {}
    for number in range(num_tensors):
        give |= _rows(f"t{number:04d}", 16 + 4 * (number % 7), 256)
        take |= _columns(f"t{number:04d}", 16 + 4 * (number % 7), 256)
    started = time.perf_counter()
    for name in give:
        reshard({name: give[name]}, {name: take[name]}, host_of=_hosts())
    one_by_one = time.perf_counter() - started
    processor: list[float] = []

    def anew() -> None:
        started_s = time.thread_time()
        reshard(give, take, host_of=_hosts())
        processor.append(time.thread_time() - started_s)

    kept = Resharder(host_of=_hosts())
    kept.reshard(give, take)
    by_hand = _state_by_hand([one.tensor for one in give.values()], [one.tensor for one in take.values()])
    together, again, hand = _in_turn([anew, lambda: kept.reshard(give, take), by_hand], repeat)
    planned = time.perf_counter()
    plan_reshard(gather_moves(give, take), _hosts())
    planning = time.perf_counter() - planned
    return StateTimes(together, again, hand, one_by_one, planning, statistics.median(processor))


def rows(pool: RankPool, num_rows: int, num_tensors: int, repeat: int) -> list[Row]:
    """All loopback rows."""
    size = f"{num_rows * 4096 >> 20} MiB"
    found = []
    cases = (
        # Columns lie apart in memory: their sender packs them first.
        (f"rows to columns, {size}", large_tensor, 2.0, "columns packed by hand"),
        (f"1 to 3, {size}", large_multicast, 1.5, "the same chunks passed on by hand"),
    )
    for case, measure, goal, hand in cases:
        run, apart, plain, by_hand, least = pool.run(measure, NUM_RANKS, (num_rows, repeat), timeout_s=120)[0]
        bound = (by_hand + least) / plain
        found.append(at_most(f"{case}: run over plain messages", run / plain, "ratio", goal, peer="gloo", bound=bound))
        found.append(Row(f"{case}: planned for four hosts, over plain messages", apart / plain, "ratio", peer="gloo"))
        found.append(Row(f"{case}: run over {hand}", run / by_hand, "ratio", peer="by hand"))
        found.append(Row(f"{case}: run of one element a rank, its agreement and end", least, "s"))
    return found + _rows_of_state(num_tensors, pool.run(state, NUM_RANKS, (num_tensors, repeat), timeout_s=120)[0])


def _rows_of_state(num_tensors: int, took: StateTimes) -> list[Row]:
    case, hand = f"{num_tensors} small tensors", took.by_hand
    return [
        at_least(f"{case}: one by one over together", took.one_by_one / took.together, "ratio", 3.0, peer="one by one"),
        at_most(f"{case}: gather, plan and run", took.together, "s", 0.1, bound=hand),
        Row(f"{case}: gather and plan of that", took.planning, "s"),
        Row(f"{case}: processor time of a rank of that", took.processor, "s"),
        Row(f"{case}: together over packed by hand", took.together / hand, "ratio", peer="by hand"),
        Row(f"{case}: with the plan kept over packed by hand", took.again / hand, "ratio", peer="by hand"),
    ]


def _packed_by_hand(rows: torch.Tensor, columns: torch.Tensor) -> Callable[[], None]:
    """What a program would write that knows its two layouts: columns packed, sent, received where they belong."""
    rank, height, width = dist.get_rank(), rows.shape[0], columns.shape[1]
    others = [other for other in range(NUM_RANKS) if other != rank]
    places = [columns[height * other : height * (other + 1)] for other in range(NUM_RANKS)]

    def act() -> None:
        packed = {other: rows[:, width * other : width * (other + 1)].contiguous() for other in others}
        works = [dist.irecv(places[other], other) for other in others]
        works += [dist.isend(packed[other], other) for other in others]
        places[rank].copy_(rows[:, width * rank : width * (rank + 1)])
        for work in works:
            if work is not None:
                work.wait()

    return act


def _passed_on_by_hand(whole: torch.Tensor, num_chunks: int) -> Callable[[], None]:
    """A chain written for one tensor that all ranks get from rank 0: each passes on chunk by chunk."""
    rank = dist.get_rank()
    chunks = whole.view(-1).chunk(num_chunks)

    def act() -> None:
        arriving = [dist.irecv(chunk, rank - 1) for chunk in chunks] if rank else [None] * len(chunks)
        leaving = []
        for chunk, work in zip(chunks, arriving, strict=True):
            if work is not None:
                work.wait()
            if rank + 1 < NUM_RANKS:
                leaving.append(dist.isend(chunk, rank + 1))
        for work in leaving:
            if work is not None:
                work.wait()

    return act


def _least_run() -> Callable[[], object]:
    """A run that moves one element between any two ranks."""
    give, take = _rows("least", NUM_RANKS, NUM_RANKS), _columns("least", NUM_RANKS, NUM_RANKS)
    plan = plan_reshard(gather_moves(give, take), _hosts())
    return lambda: run_plan(plan, give, take)


def _state_by_hand(rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor]) -> Callable[[], None]:
    """As `_packed_by_hand`, for all tensors of a state together."""
    rank, width = dist.get_rank(), columns[0].shape[1]
    others = [other for other in range(NUM_RANKS) if other != rank]
    heights = [one.shape[0] for one in rows]
    room = {other: torch.empty(sum(heights) * width) for other in others}

    def act() -> None:
        works = [dist.irecv(room[other], other) for other in others]
        for other in others:
            packed = torch.cat([one[:, width * other : width * (other + 1)].reshape(-1) for one in rows])
            works.append(dist.isend(packed, other))
        for one, place, height in zip(rows, columns, heights, strict=True):
            place[height * rank : height * (rank + 1)].copy_(one[:, width * rank : width * (rank + 1)])
        for work in works:
            if work is not None:
                work.wait()
        for other in others:
            parts = room[other].split_with_sizes([height * width for height in heights])
            for part, place, height in zip(parts, columns, heights, strict=True):
                place[height * other : height * (other + 1)].copy_(part.view(height, width))

    return act


def _plain(bytes_by_pair: Mapping[tuple[int, int], int]) -> Callable[[], None]:
    rank = dist.get_rank()
    sends = {taker: torch.ones(n, dtype=torch.uint8) for (giver, taker), n in bytes_by_pair.items() if giver == rank}
    takes = {giver: torch.ones(n, dtype=torch.uint8) for (giver, taker), n in bytes_by_pair.items() if taker == rank}

    def act() -> None:
        works = [dist.irecv(buffer, giver) for giver, buffer in takes.items()]
        works += [dist.isend(buffer, taker) for taker, buffer in sends.items()]
        for work in works:
            if work is not None:
                work.wait()

    return act


def _in_turn(acts: Sequence[Callable[[], object]], repeat: int) -> tuple[float, ...]:
    """Median seconds of each, one after the other again and again, so that what else the machine does falls on all."""
    times = [[_fastest(act, 1) for act in acts] for _ in range(repeat)]
    return tuple(map(statistics.median, zip(*times, strict=True)))


def _fastest(act: Callable[[], object], repeat: int) -> float:
    """Least seconds, over some runs, until the last rank is done."""
    best = float("inf")
    for _ in range(repeat):
        dist.barrier()
        started = time.perf_counter()
        act()
        dist.barrier()
        best = min(best, time.perf_counter() - started)
    return best


def _hosts() -> dict[int, str]:
    return dict.fromkeys(range(NUM_RANKS), "this machine")


def _piece(whole: Box, box: Box) -> Piece:
    return Piece(torch.ones(box.shape), whole.shape, (Shard(0, box),))


def _rows(name: str, num_rows: int, num_columns: int) -> Pieces:
    rank, step = dist.get_rank(), num_rows // NUM_RANKS
    whole = Box((0, 0), (num_rows, num_columns))
    return {name: _piece(whole, Box((rank * step, 0), (rank * step + step, num_columns)))}


def _columns(name: str, num_rows: int, num_columns: int) -> Pieces:
    rank, step = dist.get_rank(), num_columns // NUM_RANKS
    whole = Box((0, 0), (num_rows, num_columns))
    return {name: _piece(whole, Box((0, rank * step), (num_rows, rank * step + step)))}
