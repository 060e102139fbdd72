"""Plans by rule run over gloo: every rank works out its own part, and all parts fit together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from remesh.layout import Layout, Mesh, layout_from_spec
from remesh.layout.from_torch import Piece
from remesh.resharding import Resharder, TensorMove, plan_reshard
from remesh.resharding.planning import planner
from remesh.resharding.running import cache
from remesh.resharding.running.run import gather_timings, run_plan
from remesh.resharding.schedule.grid_rows import GridRows
from remesh.testbed.pool import RankPool

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
SHAPE = (13, 10)
# From specs on two hosts of two devices: on all four ranks, with replicas beside each other and on both hosts, uneven.
CASES = (("S01R", "RS01"), ("S0S1", "S1S0"), ("S01R", "RS0"), ("S0R", "S01R"), ("RS0", "S0R"), ("S1R", "RS01"))


def run_by_rule() -> int:
    """Each case between all ranks; how many messages they were."""
    count = 0
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).reshape(SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_MAX_NAMED", -1)
        patch.setattr(cache, "_planned", {})
        for src, dst in CASES:
            held, wanted = (
                layout_from_spec(spec, SHAPE, Mesh.of({"host": 2, "device": 2}), "int32") for spec in (src, dst)
            )
            plan = plan_reshard([TensorMove("x", held, wanted)], HOSTS)
            assert isinstance(plan.rows, GridRows)
            give, take = _piece(held, whole), _piece(wanted, whole)
            take.tensor.zero_()
            moved = run_plan(plan, {"x": give}, {"x": take})
            assert torch.equal(take.tensor, _piece(wanted, whole).tensor), (src, dst)
            assert dict(moved.bytes_by_pair) == dict(plan.bytes_by_pair)
            assert moved.missing == {}
            assert len(gather_timings(moved)) == len(plan.messages)
            # The same through the front door, where descriptions are gathered and the plan is used again.
            resharder = Resharder(host_of=HOSTS)
            for _ in range(2):
                take.tensor.zero_()
                resharder.reshard({"x": give}, {"x": take})
                assert torch.equal(take.tensor, _piece(wanted, whole).tensor), (src, dst)
            count += len(plan.messages)
    return count


def _piece(layout: Layout, whole: torch.Tensor) -> Piece:
    (shard,) = layout.shards_of(dist.get_rank())
    return Piece(whole[shard.box.slices()].clone(), SHAPE, (shard,))


def test_plans_by_rule_are_carried_out(ranks: RankPool) -> None:
    assert len(set(ranks.run(run_by_rule, 4, timeout_s=60))) == 1
