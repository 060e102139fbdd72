"""Simulated step times of each schedule, and the quality of the search, without any process.

Uniform stages with F = I = W = 1 and a transfer of ``c`` times F on a line of its own for each hop and direction,
unless a case says more. *Signal bound*: the same schedule with transfers that take no time, or 1F1B, where a case
says so. *Bound*: what no schedule beats (`remesh.pipeline.step_bound`). *Blocking*: ranks stand still while they send
and receive, one value at a time.

``python -m benchmarks.pipeline.simulated`` draws the pictures of docs/pipeline/schedules.md.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import Row, at_least, at_most, median_of
from remesh.pipeline.costs import Costs, EdgeCost, Lines, StageCost
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.peaks import compute_peaks
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import SCHEDULES, build_schedule, one_f_one_b
from remesh.pipeline.search import Found, search_schedule
from remesh.pipeline.step_pictures import draw_svg
from remesh.pipeline.step_simulation import Transfers, compute_signal_bound_s, simulate_schedule

SEED = 9
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0)
SIZES = ((2, 32), (4, 16), (8, 32))
BLOCKING, SEARCHED = "1f1b, blocking", "searched"
NAMES = (BLOCKING, "1f1b", "1f1b-split", "eager-1f1b", "eager-split", SEARCHED)
NUM_MICROBATCHES = (4, 8, 16, 32, 64)
U_SHAPE = StageGraph(4, (*StageGraph.chain(4).edges, Edge(0, 3, "skip"), Edge(1, 2, "skip")))
"""A U-shaped model in four stages: long skip connections to the mirror image."""
TOLERANCE = 0.01
_DOCS = Path(__file__).resolve().parents[2] / "docs" / "pipeline"


def step_s(name: str, graph: StageGraph, costs: Costs, num: int) -> float:
    """The time of a step under a schedule by name; searched anew for `SEARCHED`."""
    if name == SEARCHED:
        return search_schedule(graph, costs, num).step_s
    transfers = Transfers.BLOCKING if name == BLOCKING else Transfers.ASYNC
    schedule = SCHEDULES["1f1b" if name == BLOCKING else name](graph.num_stages, num)
    return simulate_schedule(schedule, graph, costs, transfers=transfers).step_s


def fractions(num_stages: int, num: int) -> dict[str, dict[str, float]]:
    """By ratio of transfer to forward time: signal bound of 1F1B over the step time, by schedule."""
    graph = StageGraph.chain(num_stages)
    signal_s = step_s("1f1b", graph, Costs.uniform(graph), num)
    return {
        f"{ratio:g}": {
            name: signal_s / step_s(name, graph, Costs.uniform(graph, transfer_s=ratio), num) for name in NAMES
        }
        for ratio in RATIOS
    }


def own_fraction(graph: StageGraph, costs: Costs, num: int) -> float:
    """The signal bound of the searched schedule over its step time."""
    found = search_schedule(graph, costs, num)
    return found.signal_s / found.step_s


def rows(*, quick: bool) -> list[Row]:
    """All of it as rows; what is searched has goals."""
    sizes = SIZES[:2] if quick else SIZES
    return [
        *_fraction_rows(sizes),
        *_search_rows(sizes),
        *_smallest_rows(4 if quick else 12),
        *_time_rows(repeat=2 if quick else 5),
        *_model_rows(),
        *_frontier_rows(),
        *_ablation_rows(NUM_MICROBATCHES[:3] if quick else NUM_MICROBATCHES),
    ]


def _fraction_rows(sizes: Sequence[tuple[int, int]]) -> list[Row]:
    goals = {(2, 32): {0.25: 0.95, 0.5: 0.95, 1.0: 0.95}, (4, 16): dict.fromkeys((0.25, 0.5, 1.0, 1.5), 0.90)}
    made = []
    for num_stages, num in sizes:
        for ratio, by_name in fractions(num_stages, num).items():
            case = f"simulated fraction of 1F1B's signal bound, S={num_stages} M={num} c={ratio}F"
            made += [Row(f"{case}: {name}", value, "ratio") for name, value in by_name.items()]
            value = by_name[SEARCHED] / by_name[BLOCKING]
            made.append(Row(f"{case}: searched over blocking", value, "ratio", peer="1F1B, blocking"))
        graph = StageGraph.chain(num_stages)
        for ratio in RATIOS:
            value = own_fraction(graph, Costs.uniform(graph, transfer_s=ratio), num)
            case = f"simulated fraction of its own signal bound, S={num_stages} M={num} c={ratio:g}F: searched"
            goal = goals.get((num_stages, num), {}).get(ratio)
            made.append(at_least(case, value, "ratio", goal))
    return made


def _search_rows(sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """How far the search is from the bound, from the known schedules, and from ZB-H1 without transfers."""
    over_bound, over_least = [], []
    for (num_stages, num), ratio in itertools.product(sizes, (0.0, *RATIOS)):
        graph = StageGraph.chain(num_stages)
        costs = Costs.uniform(graph, transfer_s=ratio)
        found = search_schedule(graph, costs, num, tolerance=TOLERANCE)
        over_bound.append(found.fastest_s / found.bound.step_s)
        good = [
            fullest(schedule, costs)
            for schedule in (build(num_stages, num) for build in SCHEDULES.values())
            if simulate_schedule(schedule, graph, costs).step_s <= found.fastest_s * (1 + TOLERANCE)
        ]
        over_least += [fullest(found.schedule, costs) / least for least in (min(good, default=None),) if least]
    case = "fastest found over what no schedule beats, uniform chains, worst"
    made = [at_most(case, max(over_bound), "ratio", 1.01)]
    if over_least:
        case = "memory over the least of known schedules as fast within 1 %, worst"
        made.append(at_most(case, max(over_least), "ratio", 1.0))
    for num_stages, num in sizes:
        graph = StageGraph.chain(num_stages)
        costs = Costs.uniform(graph)
        zero_bubble = SCHEDULES["zb-h1"](num_stages, num)
        limit = fullest(zero_bubble, costs)
        found = search_schedule(graph, costs, num, limits_bytes=limit, tolerance=0)
        value = found.step_s / simulate_schedule(zero_bubble, graph, costs).step_s
        case = f"step over ZB-H1 at equal memory without transfers, S={num_stages} M={num}"
        made.append(at_most(case, value, "ratio", 1.0, peer="ZB-H1"))
    return made


def fullest(schedule: Schedule, costs: Costs) -> int:
    """Bytes that the fullest rank keeps."""
    return max(peak.nbytes for peak in compute_peaks(schedule, costs))


def _smallest_rows(num_cases: int) -> list[Row]:
    """Two stages with random costs: against every warm-up, and every delay up to 4."""
    chance = random.Random(SEED)
    graph, num = StageGraph.chain(2), 6
    knobs = list(itertools.product(range(1, num + 1), (None, 0, 1, 2, 3, 4)))
    slower, larger = [], []
    for _ in range(num_cases):
        costs = random_costs(chance, graph)
        found = search_schedule(graph, costs, num, tolerance=TOLERANCE)
        every = []
        for (first, delay), (second, other) in itertools.product(knobs, repeat=2):
            if first < second:  # a deadlock
                continue
            schedule = build_schedule("any", num, [first, second], [delay, other])
            every.append((simulate_schedule(schedule, graph, costs).step_s, fullest(schedule, costs)))
        slower.append(found.fastest_s / min(time_s for time_s, _ in every))
        least = min(kept for time_s, kept in every if time_s <= found.fastest_s * (1 + TOLERANCE))
        larger.append(fullest(found.schedule, costs) / least)
    case = f"of all schedules of {num_cases} random pipelines, S=2 M={num}, worst"
    return [
        at_most(f"fastest found over the fastest {case}", max(slower), "ratio", 1.002),
        at_most(f"memory over the least within 1 % {case}", max(larger), "ratio", 1.0),
    ]


def random_costs(chance: random.Random, graph: StageGraph) -> Costs:
    """Uneven stages and edges, lines for each hop or shared."""
    stages = tuple(
        StageCost(*(chance.uniform(1, 3) for _ in range(3)), stash_bytes=chance.randint(1, 9))
        for _ in range(graph.num_stages)
    )
    edges = tuple(EdgeCost(chance.uniform(0, 3), chance.uniform(0, 3)) for _ in graph.edges)
    return Costs(stages, edges, chance.choice(list(Lines)))


def _time_rows(repeat: int) -> list[Row]:
    """How long a search takes for S=8, M=64: uniform chains, and random costs with skip edges."""
    chance = random.Random(SEED)
    chain = StageGraph.chain(8)
    skips = StageGraph(8, (*chain.edges, Edge(0, 7, "skip"), Edge(1, 6, "skip"), Edge(2, 5, "skip")))
    cases = {f"chain, c={ratio:g}F": (chain, Costs.uniform(chain, transfer_s=ratio)) for ratio in RATIOS}
    cases |= {f"three skip edges, random costs {n}": (skips, random_costs(chance, skips)) for n in range(3)}
    made = []
    for case, (graph, costs) in cases.items():
        seconds = []
        for _ in range(repeat):
            begin_s = time.perf_counter()
            search_schedule(graph, costs, 64)
            seconds.append(time.perf_counter() - begin_s)
        made.append(median_of(f"search S=8 M=64, {case}", seconds, "s", 1.0))
    return made


def _model_rows() -> list[Row]:
    """The shapes of the paper's models: short transfers on a chain, and skip edges as long as the forward."""
    cases = {
        "like a GPT, S=2 M=32 c=0.1F": (StageGraph.chain(2), 0.1, 32, 0.97, 1.1),
        "like a GPT, S=2 M=32 c=0.25F": (StageGraph.chain(2), 0.25, 32, 0.97, 1.1),
        "like a U-Transformer, S=2 M=32, two edges of 0.5F": (_two_edges(), 0.5, 32, 0.90, 1.5),
        "like a U-Transformer, S=2 M=32, two edges of 1F": (_two_edges(), 1.0, 32, 0.90, 1.5),
        "like a U-Transformer, S=4 M=32, edges of 0.5F": (U_SHAPE, 0.5, 32, 0.90, 1.5),
    }
    made = []
    for case, (graph, ratio, num, fraction_goal, gain_goal) in cases.items():
        costs = Costs.uniform(graph, transfer_s=ratio)
        found = search_schedule(graph, costs, num)
        gain = step_s(BLOCKING, graph, costs, num) / found.step_s
        made.append(at_least(f"{case}: of its signal bound", found.signal_s / found.step_s, "ratio", fraction_goal))
        made.append(at_least(f"{case}: over blocking 1F1B", gain, "ratio", gain_goal, peer="1F1B, blocking"))
    return made


def _two_edges() -> StageGraph:
    return StageGraph(2, (Edge(0, 1, "hidden"), Edge(0, 1, "skip")))


ABLATION = {
    "broadcast": BLOCKING,
    "overlap": "1f1b",
    "eager": "eager-1f1b",
    "+ weight delay": "eager-split",
    "searched": SEARCHED,
}
"""Fig. 9 of arXiv 2211.05322, and what the search adds."""


def ablation(nums: Sequence[int]) -> dict[str, dict[str, float]]:
    """By number of micro-batches: throughput over that of blocking 1F1B, U-shaped in 4 stages, transfers of 0.5 F."""
    costs = Costs.uniform(U_SHAPE, transfer_s=0.5)
    found = {}
    for num in nums:
        steps = {label: step_s(name, U_SHAPE, costs, num) for label, name in ABLATION.items()}
        found[f"M={num}"] = {label: steps["broadcast"] / each for label, each in steps.items()}
    return found


def _ablation_rows(nums: Sequence[int]) -> list[Row]:
    return [
        Row(f"simulated ablation, U-shaped S=4 c=0.5F {case}: {label}", value, "ratio", peer="1F1B, blocking")
        for case, by_label in ablation(nums).items()
        for label, value in by_label.items()
    ]


def frontier(num_stages: int, num: int, ratio: float) -> list[Found]:
    """The fastest schedule for every limit of live micro-batches on a rank, while a larger one still helps."""
    graph = StageGraph.chain(num_stages)
    costs = Costs.uniform(graph, transfer_s=ratio)
    found: list[Found] = []
    for limit in range(1, num + 1):
        each = search_schedule(graph, costs, num, limits_bytes=limit, tolerance=0)
        if not found or each.step_s < found[-1].step_s:
            found.append(each)
    return found


def _frontier_rows() -> list[Row]:
    """Steps of four stages and 16 micro-batches, transfers as long as a forward; beside them 1F1B, which keeps 4."""
    graph, num = StageGraph.chain(4), 16
    signal_s = compute_signal_bound_s(one_f_one_b(4, num), graph, Costs.uniform(graph))
    steps = {"at most 4 live, 1F1B": step_s("1f1b", graph, Costs.uniform(graph, transfer_s=1), num)}
    for each in frontier(4, num, 1.0):
        live = max(peak.num_live for peak in each.peaks)
        steps[f"at most {live} live, warm-up + delay {', '.join(map(str, each.knobs))}"] = each.step_s
    made = []
    for case, value in steps.items():
        made.append(Row(f"frontier S=4 M={num} c=1F, {case}: step over F", value, "ratio"))
        made.append(Row(f"frontier S=4 M={num} c=1F, {case}: of 1F1B's signal bound", signal_s / value, "ratio"))
    return made


def pictures() -> Mapping[str, str]:
    """SVG documents by name: one step of four stages and eight micro-batches, transfers as long as a forward."""
    graph, num = StageGraph.chain(4), 8
    costs = Costs.uniform(graph, transfer_s=1)
    found = search_schedule(graph, costs, num)
    shown = {name: SCHEDULES[name](4, num) for name in ("1f1b", "eager-1f1b", "1f1b-split", "eager-split")}
    made = {}
    blocking = simulate_schedule(shown["1f1b"], graph, costs, transfers=Transfers.BLOCKING)
    steps = {"1f1b-blocking": ("1F1B, blocking", blocking)}
    steps |= {name: (name, simulate_schedule(each, graph, costs)) for name, each in shown.items()}
    steps["searched"] = (
        "searched: " + ", ".join(map(str, found.knobs)),
        simulate_schedule(found.schedule, graph, costs),
    )
    for name, (title, simulation) in steps.items():
        made[name] = draw_svg(simulation, title=f"{title}, step {simulation.step_s:g}", bound_s=found.bound.step_s)
    without = Costs.uniform(graph)
    simulation = simulate_schedule(SCHEDULES["zb-h1"](4, num), graph, without)
    made["zb-h1"] = draw_svg(simulation, title=f"zb-h1, no transfers, step {simulation.step_s:g}")
    return made


def write_pictures(folder: Path = _DOCS) -> None:
    """Write the pictures of docs/pipeline/schedules.md."""
    for name, svg in pictures().items():
        (folder / f"step-{name}.svg").write_text(svg)


if __name__ == "__main__":
    write_pictures()
