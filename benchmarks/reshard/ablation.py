"""Ablation of the planner: sender choice, order, splitting and routing, simulated at host level.

Two experiments, both without any process. *Orders*: the published cases and random pairs of specs under each
algorithm for senders and order, and under our plan; a value is a finish over the lower bound (Fig. 8 of
arXiv 2211.05322 as ratios). *Ways*: one sender to growing meshes, each way beside the chain, over one copy's time.

``python -m benchmarks.reshard.ablation`` writes the report of docs/reshard/ablation.md.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.report import Row, at_most, write_report
from benchmarks.reshard.planning import TABLE_2, pair_of_specs
from remesh.layout import compute_overlap
from remesh.resharding import TensorMove, plan_reshard
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.schedule.chunks import Part, SliceStream
from remesh.resharding.schedule.paper import ALGORITHMS, MulticastTask, multicast_task

SEED = 8
OURS = "ours"
WAYS = ("send_recv", "local_allgather", "global_allgather", "broadcast")
MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))
_MAX_TASKS = 64
_SPECS = [f"{a}{b}{c}" for a in ("R", "S0", "S1", "S01") for b in ("R", "S0", "S1") for c in ("R", "S0", "S1")]


@functools.cache
def orders_of_table_2() -> dict[str, dict[str, float]]:
    """For each published case the finish over the bound, by algorithm; ours as a simulated plan."""
    found = {}
    for case, (shape, src, dst) in TABLE_2.items():
        move, hosts = pair_of_specs(shape, src, dst)
        plan = plan_reshard([move], hosts)
        tasks = host_tasks(move, hosts)
        by_name = {name: order(tasks).finish / plan.lower_bound_bytes for name, order in ALGORITHMS.items()}
        by_name[OURS] = simulate_plan(plan).total_s / plan.lower_bound_bytes
        found[f"case {case}"] = by_name
    return found


def orders_of_random_pairs(num_pairs: int) -> dict[str, list[float]]:
    """Finish over bound of random pairs of specs, by algorithm; ours as the certified ratio of the plan."""
    chance = random.Random(SEED)
    names = [name for name in ALGORITHMS if name != "dfs"]
    found: dict[str, list[float]] = {name: [] for name in (*names, OURS)}
    while len(found[OURS]) < num_pairs:
        src, dst = ((_random_spec(chance), (chance.randint(1, 4), 4)) for _ in range(2))
        move, hosts = pair_of_specs((192, 192, 192), src, dst)
        tasks = host_tasks(move, hosts)
        if len(tasks) > _MAX_TASKS:
            continue
        plan = plan_reshard([move], hosts)
        for name in names:
            found[name].append(ALGORITHMS[name](tasks).finish / plan.lower_bound_bytes)
        found[OURS].append(plan.certified_ratio)
    return found


def host_tasks(move: TensorMove, hosts: Mapping[int, str]) -> list[MulticastTask]:
    """The slices of a move, as the published algorithms see them."""
    tasks = []
    for part in compute_overlap(move.src, move.dst):
        givers, takers = (tuple(sorted({int(shard.holder) for shard in side})) for side in (part.givers, part.takers))
        nbytes = part.box.size * move.src.itemsize_bytes
        tasks.append(multicast_task(SliceStream(givers, takers, [Part(0, part.box, nbytes)], nbytes), hosts))
    return tasks


def _random_spec(chance: random.Random) -> str:
    while True:
        spec = chance.choice(_SPECS)
        if spec.count("0") <= 1 and spec.count("1") <= 1:
            return spec


@functools.cache
def ways_of_one_sender() -> dict[str, dict[str, float]]:
    """For each mesh of (hosts, devices) the time over that of one copy, by way: Fig. 5 of the paper."""
    found = {}
    for mesh in MESHES:
        move, hosts = pair_of_specs((1024, 1024, 256), ("RRR", (1, 1)), ("RRR", mesh))
        by_name = {}
        for way in (*WAYS, "auto"):
            plan = plan_reshard([move], hosts, strategy=way)
            by_name[OURS if way == "auto" else way] = simulate_plan(plan).total_s / plan.lower_bound_bytes
        found[f"({mesh[0]}, {mesh[1]})"] = by_name
    return found


def rows(num_pairs: int) -> list[Row]:
    """All of it as rows; only ours have goals."""
    made = []
    for title, table in (("orders", orders_of_table_2()), ("ways", ways_of_one_sender())):
        for case, by_name in table.items():
            for name, value in by_name.items():
                text = f"simulated {title}, {case}: {name}"
                made.append(at_most(text, value, "ratio", 1.03 if name == OURS else None))
    for name, ratios in orders_of_random_pairs(num_pairs).items():
        for what, value in _summary(ratios).items():
            text = f"orders of {num_pairs} random pairs, {what}: {name}"
            made.append(at_most(text, value, "ratio", 1.005 if name == OURS else None))
    return made


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    return {
        "mean": statistics.mean(ordered),
        "90th percentile": ordered[int(0.9 * (len(ordered) - 1))],
        "worst": ordered[-1],
    }


if __name__ == "__main__":
    write_report("reshard-ablation", rows(1000), SEED)
