"""Pipelines on a real network, beside the signal bound: hosts with shaped links, real bytes, real TCP.

The *signal bound* of a case is the time of plain 1F1B with messages of one byte, in the same run: all waiting that
comes of the schedule, none that comes of transfers. A value is the bound's time over a contestant's, the median over
steps that take turns. Weight gradients that fill bubbles of 1F1B can bring a value above 1; the row "of its own bound"
compares with the same schedule instead.

- *Stubs*: stages that sleep for as long as they should and send real bytes: more stages than this machine has cores.
  Every stage has a line of its own to each neighbour, as the model of `Lines.HOP` has it; in the cases named "one NIC"
  it has one NIC for both, as `Lines.NIC` has it.
- *Models*: the GPT and the U-Transformer of the examples in two stages, one compute thread each, over a link on which
  the values of a micro-batch take the wanted part of a forward. *Paced* are stubs in the place of the two stages: they
  take as long as the stages take of a processor that has nothing else to do, all times by one factor, and send the same
  bytes. They can be measured while the machine is busy.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline.measured_ranks import Contestant, Make, Part, Told, measure, measure_torch
from benchmarks.pipeline.stubs import Pace, Stub
from benchmarks.report import Row, at_least, at_most, spread_of
from remesh.pipeline import (
    Costs,
    EdgeCost,
    Lines,
    Payload,
    Schedule,
    Stage,
    StageCost,
    StageGraph,
    Transfers,
    eager_one_f_one_b,
    eager_split,
    one_f_one_b,
    one_f_one_b_split,
    simulate_schedule,
    split_model,
)
from remesh.pipeline.peaks import compute_peaks
from remesh.pipeline.running.stage import StageWork, leaving_copy
from remesh.pipeline.search import search_schedule
from remesh.testbed import BedSpec, Testbed
from remesh.testbed.commands import NIC

BOUND, OURS, BLOCKING, ASYNC, EAGER = "signal 1F1B", "remesh", "1F1B, blocking", "1F1B, overlapped", "eager-1F1B"
OWN_BOUND, TORCH = "signal of the same schedule", "torch Schedule1F1B"
_MAX_SPREAD = 0.05
_WIRE = 1.046
"""Headers of Ethernet, IP and TCP on full packets."""
_TIMEOUT_S = 900.0
_NUM_PROBES = 7
_PACED_FORWARD_S = 0.08
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pipeline"


@dataclass(frozen=True)
class Case:
    """One pipeline on one network."""

    name: str
    graph: StageGraph
    make: Make
    num_microbatches: int
    rate_bytes_per_s: float
    """Of every link."""
    edge_bytes: tuple[int, ...]
    """Of one micro-batch, in the order of the graph's edges."""
    lines: Lines = Lines.NIC
    goals: Mapping[str, float] = field(default_factory=dict)
    """Of `OURS` against `BOUND` and against `BLOCKING`, by those names."""


# --- cases ---


def stub_case(
    num_stages: int, num_microbatches: int, ratio: float, *, goal: float | None, forward_s: float, lines: Lines
) -> Case:
    """Stages whose parts all take ``forward_s``, and a link on which a value takes ``ratio`` times that."""
    rate_bytes_per_s = 100e6 / 8
    size = int(forward_s * ratio * rate_bytes_per_s / _WIRE / 4)
    pace = Pace(forward_s, forward_s, forward_s)
    name = f"stubs S={num_stages} M={num_microbatches} c={ratio:g}F{'' if lines is Lines.HOP else ', one NIC'}"
    graph = StageGraph.chain(num_stages)
    make = functools.partial(make_stub, pace, size, num_stages)
    goals = {} if goal is None else {BOUND: goal}
    return Case(name, graph, make, num_microbatches, rate_bytes_per_s, (4 * size,) * len(graph.edges), lines, goals)


def make_stub(pace: Pace, size: int, num_stages: int, stage: int, num_microbatches: int) -> Part:
    """A stub as a part of a chain."""
    is_last = stage == num_stages - 1
    module = Stub(pace, {} if is_last else {"hidden": size}, is_first=stage == 0)
    return Part(module, {} if stage else {"hidden": torch.zeros(num_microbatches, 1)}, None, None)


def model_case(
    config: str, ratio: float, *, paced: bool, goals: Mapping[str, float], num_microbatches: int = 0
) -> Case:
    """A model in two stages, and a link on which its values take ``ratio`` times the forward of the slower stage.

    ``paced`` puts stubs in the place of its stages, which take as long as these do and send as many bytes.
    """
    model = probe_model(config)
    num = num_microbatches or model.num_microbatches
    name = f"{config} S=2 M={num} c={ratio:g}F"
    if not paced:
        rate = sum(model.edge_bytes) * _WIRE / (ratio * max(pace.forward_s for pace in model.paces))
        make: Make = functools.partial(make_model, config)
        return Case(name, model.graph, make, num, rate, model.edge_bytes, Lines.NIC, goals)
    # All times by one factor, so that a step takes seconds; bytes as they are.
    scale = _PACED_FORWARD_S / max(pace.forward_s for pace in model.paces)
    paces = tuple(Pace(p.forward_s * scale, p.input_grad_s * scale, p.weight_grad_s * scale) for p in model.paces)
    make = functools.partial(
        make_paced, paces, {e.name: n for e, n in zip(model.graph.edges, model.edge_bytes, strict=True)}
    )
    rate = sum(model.edge_bytes) * _WIRE / (ratio * _PACED_FORWARD_S)
    return Case(f"{name}, paced stubs", model.graph, make, num, rate, model.edge_bytes, Lines.NIC, goals)


def make_model(config: str, stage: int, num_microbatches: int) -> Part:
    """A stage of a model; every micro-batch has as many samples as the configuration says."""
    recipe = _recipe(config)
    torch.manual_seed(0)
    parts = split_model(recipe.build(), recipe.cut(2))
    samples = recipe.batch // recipe.num_microbatches * num_microbatches
    batch, target = recipe.make_batch(samples, 1)
    entries = {recipe.entry: batch} if parts.entries[stage] else {}
    return Part(parts.modules[stage], entries, target if stage else None, recipe.loss if stage else None)


def make_paced(paces: Sequence[Pace], edge_bytes: Mapping[str, int], stage: int, num_microbatches: int) -> Part:
    """A stub in the place of a stage of a model."""
    makes = {} if stage else {name: nbytes // 4 for name, nbytes in edge_bytes.items()}
    module = Stub(paces[stage], makes, is_first=stage == 0)
    return Part(module, {} if stage else {"hidden": torch.zeros(num_microbatches, 1)}, None, None)


@dataclass(frozen=True)
class Probed:
    """A model in two stages, as it is here."""

    graph: StageGraph
    edge_bytes: tuple[int, ...]
    paces: tuple[Pace, ...]
    num_microbatches: int


@functools.cache
def probe_model(config: str) -> Probed:
    """What the stages of a model take of a processor, one micro-batch on one thread, and what they send.

    Time of the thread, not of the clock: what else the machine does does not count.
    """
    torch.set_num_threads(1)
    recipe = _recipe(config)
    num = recipe.num_microbatches
    parts = [make_model(config, stage, num) for stage in (0, 1)]
    graph = split_model(recipe.build(), recipe.cut(2)).graph
    names = tuple(edge.name for edge in graph.edges)
    works = [
        StageWork(Stage(0, parts[0].module), names, num),
        StageWork(Stage(1, parts[1].module, loss=parts[1].loss), (), num),
    ]
    entries = {name: entry.chunk(num)[0] for name, entry in parts[0].batch.items()}
    assert parts[1].target is not None
    target = parts[1].target.chunk(num)[0]
    times: list[list[list[float]]] = [[[], [], []] for _ in works]
    for number in range(_NUM_PROBES):
        made = _timed(times[0][0], lambda n=number: works[0].run_forward(n, {}, entries, None))
        taken = {name: leaving_copy(value) for name, value in made.items()}
        _timed(times[1][0], lambda n=number, t=taken: works[1].run_forward(n, t, {}, target))
        found = _timed(times[1][1], lambda n=number: works[1].run_input_backward(n, {}))
        _timed(times[1][2], lambda n=number: works[1].run_weight_backward(n))
        _timed(times[0][1], lambda n=number, f=found: works[0].run_input_backward(n, f))
        _timed(times[0][2], lambda n=number: works[0].run_weight_backward(n))
    paces = tuple(Pace(*(statistics.median(kind) for kind in stage)) for stage in times)
    return Probed(graph, tuple(made[name].nbytes for name in names), paces, num)


def _timed(times: list[float], act: Callable[[], Any]) -> Any:
    begun_s = time.thread_time()
    done = act()
    times.append(time.thread_time() - begun_s)
    return done


def _recipe(config: str) -> Any:
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))
    from models import recipe_of  # noqa: PLC0415 - an example is no package; its folder has to be on the path first

    return recipe_of(config)


# --- measuring ---


@dataclass(frozen=True)
class Measured:
    """One case, measured."""

    case: Case
    schedule: Schedule
    """What the search found."""
    costs: Costs
    """What it was found with: measured here."""
    seconds: Mapping[str, Sequence[float]]
    """By contestant, of every step, until the last rank was done."""
    peaks: Mapping[str, Sequence[int]]
    """By contestant, of every stage."""
    contestants: Sequence[Contestant]


def measure_case(case: Case, *, repeat: int = 3, extra: Sequence[Contestant] = (), with_torch: bool = True) -> Measured:
    """Calibrate, search, run all contestants in turn."""
    num_stages, num = case.graph.num_stages, case.num_microbatches
    rate = None if case.lines is Lines.HOP else case.rate_bytes_per_s
    with Testbed(BedSpec.uniform(num_stages, rate)) as bed:
        if case.lines is Lines.HOP:
            _give_lines(bed, case)
        calibrate = [Contestant("split", one_f_one_b_split(num_stages, num), payload=Payload.SIGNALS)]
        calibrate.append(Contestant("whole", one_f_one_b(num_stages, num), payload=Payload.SIGNALS))
        told = bed.run(measure, 1, (case.make, case.graph, calibrate, 1), timeout_s=_TIMEOUT_S)
        costs = costs_of(case, told)
        schedule = search_schedule(case.graph, costs, num).schedule
        contestants = [
            Contestant(BOUND, one_f_one_b(num_stages, num), payload=Payload.SIGNALS),
            Contestant(OWN_BOUND, schedule, payload=Payload.SIGNALS),
            Contestant(OURS, schedule),
            Contestant(BLOCKING, one_f_one_b(num_stages, num), Transfers.BLOCKING),
            Contestant(ASYNC, one_f_one_b(num_stages, num)),
            Contestant(EAGER, eager_one_f_one_b(num_stages, num)),
            *extra,
        ]
        told = bed.run(measure, 1, (case.make, case.graph, contestants, repeat), timeout_s=_TIMEOUT_S)
        seconds = {each.name: _slowest([one.seconds[each.name] for one in told]) for each in contestants}
        if with_torch:
            seconds[TORCH] = _slowest(bed.run(measure_torch, 1, (case.make, num, repeat), timeout_s=_TIMEOUT_S))
    peaks = {each.name: [one.peak_stashes[each.name] for one in told] for each in contestants}
    return Measured(case, schedule, costs_of(case, told), seconds, peaks, contestants)


def costs_of(case: Case, told: Sequence[Told]) -> Costs:
    """What was measured, as the simulator takes it."""
    stages = []
    for one in told:
        input_grad_s = one.compute_s.get("I", 0.0)
        weight_grad_s = one.compute_s.get("W", one.compute_s.get("B", 0.0))
        stages.append(StageCost(one.compute_s["F"], input_grad_s, weight_grad_s, stash_bytes=1))
    edges = []
    for nbytes in case.edge_bytes:
        transfer_s = nbytes * _WIRE / case.rate_bytes_per_s
        edges.append(EdgeCost(transfer_s, transfer_s))
    return Costs(tuple(stages), tuple(edges), case.lines)


def _slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(step) for step in zip(*by_rank, strict=True)]


def _give_lines(bed: Testbed, case: Case) -> None:
    """Shape what each host sends to each of its neighbours by itself, in place of its NIC."""
    rate = f"{round(case.rate_bytes_per_s * 8)}bit"
    for stage in range(case.graph.num_stages):
        commands = [f"tc qdisc replace dev {NIC} root handle 1: htb default 99 r2q 1000"]
        commands.append(f"tc class add dev {NIC} parent 1: classid 1:99 htb rate 10gbit")
        ends = {edge.target for edge in case.graph.edges_out_of(stage)}
        ends |= {edge.source for edge in case.graph.edges_into(stage)}
        for other in sorted(ends):
            number = other + 1
            address = bed.address_of(bed.spec.names[other])
            commands += [
                f"tc class add dev {NIC} parent 1: classid 1:{number} htb rate {rate} burst 16kb cburst 16kb",
                f"tc qdisc add dev {NIC} parent 1:{number} pfifo limit 2000",
                f"tc filter add dev {NIC} protocol ip parent 1: prio 1 u32 match ip dst {address}/32 flowid 1:{number}",
            ]
        shaping = bed.start_program(bed.spec.names[stage], ["sh", "-ec", "\n".join(commands)], output=subprocess.PIPE)
        output, _ = shaping.communicate(timeout=30)
        if shaping.returncode:
            raise RuntimeError(f"shaping the lines of stage {stage}: {output.decode(errors='replace')}")


# --- rows ---


def rows_of(measured: Measured) -> list[Row]:
    """Fractions of the bound, gains over blocking, and how well the simulator knew it."""
    case, seconds = measured.case, measured.seconds
    name, quiet = case.name, is_quiet(measured)
    rows = []
    for contestant in (OURS, ASYNC, EAGER, BLOCKING, TORCH):
        if contestant not in seconds:
            continue
        value, spread = _ratio(seconds[BOUND], seconds[contestant])
        goal = case.goals.get(BOUND) if contestant == OURS and quiet else None
        peer = None if contestant == OURS else contestant
        text = f"{name}: fraction of the signal bound, {contestant}"
        rows.append(at_least(text, value, "fraction", goal, peer=peer, bound=1.0, spread=spread))
    own, spread = _ratio(seconds[OWN_BOUND], seconds[OURS])
    rows.append(Row(f"{name}: of its own bound, {measured.schedule.name}", own, "fraction", bound=1.0, spread=spread))
    gain, spread = _ratio(seconds[BLOCKING], seconds[OURS])
    goal = case.goals.get(BLOCKING) if quiet else None
    rows.append(at_least(f"{name}: gain over {BLOCKING}", gain, "ratio", goal, peer=BLOCKING, spread=spread))
    rows += _simulator_rows(measured, quiet)
    if not quiet:
        rows.append(Row(f"{name}: no verdict, the machine was busy", os.getloadavg()[0], "load"))
    return rows


def _simulator_rows(measured: Measured, quiet: bool) -> list[Row]:
    case = measured.case
    worst = 0.0
    for each in measured.contestants:
        if each.transfers is Transfers.BLOCKING:
            continue  # the model's blocking ranks stand still for what they take, too; these do not
        costs = measured.costs.without_transfers() if each.payload is Payload.SIGNALS else measured.costs
        predicted_s = simulate_schedule(each.schedule, case.graph, costs).step_s
        worst = max(worst, abs(predicted_s / statistics.median(measured.seconds[each.name]) - 1))
    text = f"{case.name}: predicted step time, largest error"
    rows = [at_most(text, worst, "fraction", 0.05 if quiet else None)]
    wrong = 0
    for each in measured.contestants:
        expected = [peak.num_live for peak in compute_peaks(each.schedule)]
        wrong += sum(a != b for a, b in zip(expected, measured.peaks[each.name], strict=True))
    rows.append(at_most(f"{case.name}: stages whose peak of stashes was not the predicted one", wrong, "stages", 0))
    return rows


def is_quiet(measured: Measured) -> bool:
    """Whether the bound, which nothing but the machine can disturb, was the same in every step."""
    bound = measured.seconds[BOUND]
    return spread_of(bound) <= _MAX_SPREAD


def _ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Median of the ratios of steps that followed each other, and their spread."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return statistics.median(ratios), spread_of(ratios)


def ablation_of(case: Case, repeat: int) -> dict[str, float]:
    """Step times of the paper's Fig. 9, and the bound: median seconds by name."""
    num = case.num_microbatches
    contestants = [
        Contestant(BOUND, one_f_one_b(2, num), payload=Payload.SIGNALS),
        Contestant("Broadcast", one_f_one_b(2, num), Transfers.BLOCKING),
        Contestant("Overlap", one_f_one_b(2, num)),
        Contestant("Eager", eager_one_f_one_b(2, num) if num > 2 else one_f_one_b(2, num)),
        Contestant("Eager + weight delaying", eager_split(2, num)),
    ]
    with Testbed(BedSpec.uniform(2, case.rate_bytes_per_s)) as bed:
        told = bed.run(measure, 1, (case.make, case.graph, contestants, repeat), timeout_s=_TIMEOUT_S)
    return {each.name: statistics.median(_slowest([one.seconds[each.name] for one in told])) for each in contestants}


def ablation_rows(*, quick: bool) -> list[Row]:
    """Fig. 9 over numbers of micro-batches: how many times as fast as Broadcast."""
    rows = []
    for num in (4, 8, 16) if quick else (4, 8, 16, 32):
        case = model_case("u-transformer-bench", 1.0, paced=True, goals={}, num_microbatches=num)
        seconds = ablation_of(case, 1 if quick else 3)
        for name, value in seconds.items():
            if name != "Broadcast":
                text = f"ablation U-Transformer, paced, M={num}: {name}"
                rows.append(Row(text, seconds["Broadcast"] / value, "ratio", peer="Broadcast"))
    return rows


def cases(*, quick: bool, models: bool) -> list[Case]:
    """All cases; ``models`` adds those in which stages compute, for a machine that has nothing else to do."""
    found = []
    for ratio, goal in ((0.5, 0.95), (1.0, 0.95), (1.5, None)):
        found.append(stub_case(2, 32, ratio, goal=goal, forward_s=0.02, lines=Lines.HOP))
    for ratio, goal in ((1.0, 0.90), (1.5, 0.90)):
        found.append(stub_case(4, 16, ratio, goal=goal, forward_s=0.04, lines=Lines.HOP))
    found.append(stub_case(4, 16, 1.0, goal=None, forward_s=0.04, lines=Lines.NIC))
    if quick:
        found = [found[1], found[4]]
    for paced in (True, False) if models else (True,):
        found.append(model_case("gpt-bench", 0.25, paced=paced, goals={BOUND: 0.97, BLOCKING: 1.1}))
        found.append(model_case("u-transformer-bench", 1.25, paced=paced, goals={BOUND: 0.90, BLOCKING: 1.5}))
    return found


def rows(*, quick: bool, models: bool) -> list[Row]:
    """All rows of the testbed."""
    found = []
    for case in cases(quick=quick, models=models):
        with_torch = case.graph == StageGraph.chain(case.graph.num_stages) or len(case.graph.edges) == 1
        found += rows_of(measure_case(case, repeat=2 if quick else 3, with_torch=with_torch))
        print(f"{case.name}: {len(found)} rows so far, load {os.getloadavg()[0]:.1f}", flush=True)
    return found + ablation_rows(quick=quick)
