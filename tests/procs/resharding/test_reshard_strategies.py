"""Plans of every strategy run over gloo, and what was measured lies beside what was planned."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from remesh.layout import Box, Layout, Shard
from remesh.layout.from_torch import Piece
from remesh.resharding import Plan, TensorMove, plan_reshard
from remesh.resharding.model.network import Network
from remesh.resharding.pictures.trace import build_trace
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.running.run import gather_timings, run_plan
from remesh.resharding.schedule.paper import STRATEGIES
from remesh.testbed.pool import RankPool

# Two replicas on one host each, two takers of everything on another; one giver wants what it lacks as well.
HOSTS = {0: "a", 1: "b", 2: "c", 3: "c"}
SHAPE = (96, 64)


def make_plan(strategy: str) -> Plan:
    whole, top, bottom = Box((0, 0), SHAPE), Box((0, 0), (48, 64)), Box((48, 0), SHAPE)
    src = Layout(SHAPE, (Shard(0, whole), Shard(1, top)), "int32")
    dst = Layout(SHAPE, (Shard(1, bottom), Shard(2, whole), Shard(3, whole)), "int32")
    return plan_reshard([TensorMove("x", src, dst)], HOSTS, chunk_bytes=1024, strategy=strategy)


def run(strategies: tuple[str, ...]) -> list[int]:
    found = []
    for strategy in strategies:
        plan = make_plan(strategy)
        rank = dist.get_rank()
        whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).reshape(SHAPE)
        give, take = (_piece(plan, whole, rank, src) for src in (True, False))
        moved = run_plan(plan, {"x": give} if give else {}, {"x": take} if take else {})
        if take:
            expected = whole[take.shards[0].box.slices()]
            assert torch.equal(take.tensor, expected), strategy
        timings = gather_timings(moved)
        assert sorted((t.round, t.giver, t.taker, t.nbytes) for t in timings) == sorted(
            (m.round, m.giver, m.taker, m.nbytes) for m in simulate_plan(plan, Network.uniform("abc")).messages
        )
        sources = {"planned": simulate_plan(plan).messages, "measured": timings}
        found.append(sum(event["ph"] == "X" for event in build_trace(sources, plan.host_of)["traceEvents"]))
        assert found[-1] == 4 * len(plan.messages)
    return found


def _piece(plan: Plan, whole: torch.Tensor, rank: int, src: bool) -> Piece | None:
    layout = plan.moves[0].src if src else plan.moves[0].dst
    shards = layout.shards_of(rank)
    if not shards:
        return None
    tensor = whole[shards[0].box.slices()].clone()
    return Piece(tensor if src else torch.zeros_like(tensor), SHAPE, (Shard(0, shards[0].box),))


NAMES = ("auto", *STRATEGIES)


@pytest.mark.parametrize("names", [NAMES[:7], NAMES[7:]], ids=["ways", "orders"])
def test_every_strategy_fills_the_takers_bit_by_bit(ranks: RankPool, names: tuple[str, ...]) -> None:
    assert ranks.run(run, 4, (names,), timeout_s=60)
