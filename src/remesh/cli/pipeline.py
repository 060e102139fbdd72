"""``remesh pipeline``: draw, compare and search pipeline schedules, without any rank being there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from remesh.cli.shown import JSON, print_json, print_table, say, say_text, waiting, width_of_terminal, with_progress
from remesh.cli.small_files import OutputFile, OutputPath, read_json, read_text
from remesh.foundation.errors import ConfigError
from remesh.pipeline.costs import Costs, EdgeCost, Lines, StageCost, read_costs
from remesh.pipeline.csv_text import read_csv, write_csv
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.peaks import compute_peaks
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import SCHEDULES
from remesh.pipeline.search import search_schedule
from remesh.pipeline.step_bound import StepBound, compute_bound
from remesh.pipeline.step_pictures import draw_svg, draw_text
from remesh.pipeline.step_simulation import Simulation, Transfers, compute_signal_bound_s, simulate_schedule

_FILE = click.Path(path_type=Path)
_OUTPUT = OutputPath()
_TRANSFERS = [each.value for each in Transfers]


@dataclass(frozen=True, slots=True)
class Asked:
    """The pipeline that the options describe."""

    graph: StageGraph
    costs: Costs
    num_microbatches: int

    @property
    def bound(self) -> StepBound:
        """The lower bound of the time of a step."""
        return compute_bound(self.graph, self.costs, self.num_microbatches)


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a pipeline; all of its verbs have them."""
    options = (
        click.option(
            "--stages", type=click.IntRange(1, 1024), help="Number of stages; they form a chain (default: 4)."
        ),
        click.option(
            "--microbatches",
            "-m",
            type=click.IntRange(1, 65536),
            default=8,
            show_default=True,
            help="Number of micro-batches in a step.",
        ),
        click.option("--compute", help="Times of F, I and W, the same for every stage (default: 1,1,1)."),
        click.option("--transfer", type=float, help="Time to send a value to the next stage (default: 0)."),
        click.option("--nic", is_flag=True, help="Let all values of a rank share one outgoing and one incoming link."),
        click.option(
            "--costs", type=_FILE, help="JSON file with the stage graph and its costs, instead of the options above."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def pipeline() -> None:
    """Draw, compare and search pipeline schedules.

    A schedule is one of gpipe, 1f1b, eager-1f1b, 1f1b-split, eager-split, zb-h1, or a CSV file with one line for each
    rank, as torch.distributed.pipelining writes it. Times may be in any unit.

    F is the forward of a micro-batch, I the gradient of its inputs, W that of its weights; B is I and W in one.

    \b
    remesh pipeline compare --stages 4 -m 16 --transfer 1
    remesh pipeline draw eager-split -m 8 --transfer 0.5 --svg step.svg
    """


@pipeline.command()
@click.argument("schedule")
@_job_options
@click.option(
    "--transfers",
    type=click.Choice(_TRANSFERS),
    default="async",
    show_default=True,
    help="Transfers overlap with compute (async), or block it (blocking).",
)
@click.option("--svg", type=_OUTPUT, help="Write the picture to this file.")
@click.option("--csv", "table", type=_OUTPUT, help="Write the schedule to this file, as torch reads it.")
@JSON
def draw(
    schedule: str,
    transfers: str,
    svg: OutputFile | None,
    table: OutputFile | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw SCHEDULE over time, and print its step time and memory."""
    job = build_job(**options)
    made = _schedule(schedule, job)
    # A table brings its own number of micro-batches.
    job = Asked(job.graph, job.costs, made.num_microbatches)
    simulation = simulate_schedule(made, job.graph, job.costs, transfers=Transfers(transfers))
    _show(made, simulation, job, as_json)
    if svg:
        svg.write(draw_svg(simulation, title=_title(made, simulation), bound_s=_bound_s(made, job)), err=as_json)
    if table:
        table.write(write_csv(made), err=as_json)


@pipeline.command(short_help="Simulate every known schedule.")
@_job_options
@JSON
def compare(as_json: bool, **options: Any) -> None:
    """Simulate every known schedule, 1F1B with blocking transfers, and the searched schedule.

    Columns: the time of a step; the time of 1F1B if transfers took no time (signal) and the lower bound of all
    schedules (bound), both as fractions of the step; the longest time that a rank waits for communication; the most
    micro-batches that a rank keeps (live).
    """
    job = build_job(**options)
    plain = SCHEDULES["1f1b"](job.graph.num_stages, job.num_microbatches)
    signal_s = compute_signal_bound_s(plain, job.graph, job.costs)
    ways = with_progress(_ways(job), "simulating")
    rows = [_compared(name, build(), transfers, job) for name, build, transfers in ways]
    if as_json:
        print_json(
            {
                "num_stages": job.graph.num_stages,
                "num_microbatches": job.num_microbatches,
                "bound_s": job.bound.step_s,
                "reason": job.bound.reason,
                "signal_bound_s": signal_s,
                "schedules": rows,
            }
        )
        return
    headings = ("schedule", "step", "signal", "bound", "waits", "live")
    cells = []
    for row in rows:
        step_s = row["step_s"]
        ratios = (f"{signal_s / step_s:.3f}", f"{job.bound.step_s / step_s:.3f}") if step_s else ("-", "-")
        cells.append((row["schedule"], f"{step_s:.6g}", *ratios, f"{row['waited_s']:.4g}", str(row["num_live"])))
    say(f"{job.graph.num_stages} stages, {job.num_microbatches} micro-batches")
    print_table(headings, cells, right=headings[1:])
    say(f"bound: {job.bound.step_s:.6g}, {job.bound.reason}")


def _ways(job: Asked) -> list[tuple[str, Callable[[], Schedule], Transfers]]:
    """What is compared: a name, what makes the schedule, and how values are sent."""
    num_stages, num = job.graph.num_stages, job.num_microbatches
    plain = partial(SCHEDULES["1f1b"], num_stages, num)
    ways = [("1f1b, blocking", plain, Transfers.BLOCKING)]
    ways += [(name, partial(build, num_stages, num), Transfers.ASYNC) for name, build in SCHEDULES.items()]
    return [*ways, ("searched", lambda: search_schedule(job.graph, job.costs, num).schedule, Transfers.ASYNC)]


def _compared(name: str, made: Schedule, transfers: Transfers, job: Asked) -> dict[str, Any]:
    """A row of the comparison: what a step takes, the longest wait of a rank, the most micro-batches on one."""
    simulation = simulate_schedule(made, job.graph, job.costs, transfers=transfers)
    num_live = max(peak.num_live for peak in compute_peaks(made))
    return {
        "schedule": name,
        "step_s": simulation.step_s,
        "waited_s": max(simulation.waited_s),
        "num_live": num_live,
    }


@pipeline.command(short_help="Find the best schedule within a memory limit.")
@_job_options
@click.option(
    "--limit",
    type=click.IntRange(0),
    help="Memory limit of a rank in bytes; without --costs each kept micro-batch counts as 1.",
)
@click.option(
    "--tolerance",
    type=float,
    default=0.01,
    show_default=True,
    help="Fraction of the step time that may be given up to save memory.",
)
@click.option(
    "--effort",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Effort of the search; 1 takes a quarter of a second or less.",
)
@click.option("--svg", type=_OUTPUT, help="Write the picture to this file.")
@click.option("--csv", "table", type=_OUTPUT, help="Write the schedule to this file, as torch reads it.")
@JSON
def search(
    limit: int | None,
    tolerance: float,
    effort: int,
    svg: OutputFile | None,
    table: OutputFile | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the schedule with the least memory among the fastest ones, under a memory limit."""
    job = build_job(**options)
    with waiting("searching"):
        found = search_schedule(
            job.graph, job.costs, job.num_microbatches, limits_bytes=limit, tolerance=tolerance, effort=effort
        )
    simulation = simulate_schedule(found.schedule, job.graph, job.costs)
    _show(found.schedule, simulation, job, as_json, found.reason)
    if svg:
        picture = draw_svg(simulation, title=_title(found.schedule, simulation), bound_s=found.bound.step_s)
        svg.write(picture, err=as_json)
    if table:
        table.write(write_csv(found.schedule), err=as_json)


def build_job(
    stages: int | None,
    microbatches: int,
    compute: str | None,
    transfer: float | None,
    nic: bool,
    costs: Path | None,
) -> Asked:
    """The job that the options describe; `PipelineError` when they contradict each other."""
    if costs is not None:
        if (stages, compute, transfer, nic) != (None, None, None, False):
            raise PipelineError(
                "reading the options: --costs already gives stages, times and links; leave the other options out"
            )
        return Asked(*_read_costs(costs), microbatches)
    parts = (compute or "1,1,1").split(",")
    try:
        times = [float(part) for part in parts]
    except ValueError:
        times = []
    if len(times) != 3:
        raise PipelineError(
            f"reading --compute {compute!r}: expected three times with commas between them, as in 1,1,1"
        )
    graph = StageGraph.chain(stages or 4)
    cost = StageCost(times[0], times[1], times[2], stash_bytes=1)
    edge = EdgeCost(transfer or 0.0, transfer or 0.0)
    lines = Lines.NIC if nic else Lines.HOP
    return Asked(graph, Costs((cost,) * graph.num_stages, (edge,) * len(graph.edges), lines), microbatches)


def _schedule(name: str, job: Asked) -> Schedule:
    if name in SCHEDULES:
        return SCHEDULES[name](job.graph.num_stages, job.num_microbatches)
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"looking for the schedule {name!r}: expected a CSV file or one of {', '.join(SCHEDULES)}")
    return read_csv(read_text(path, "the schedule in"), name=path.stem)


def _bound_s(made: Schedule, job: Asked) -> float | None:
    """The bound, which holds for one stage on each rank."""
    return job.bound.step_s if len(made.rows) == made.num_stages else None


def _title(made: Schedule, simulation: Simulation) -> str:
    return f"{made.name}: {made.num_stages} stages, {made.num_microbatches} micro-batches, {simulation.step_s:.6g}"


def _show(made: Schedule, simulation: Simulation, job: Asked, as_json: bool, reason: str = "") -> None:
    """Print a schedule and what it takes."""
    signal_s = compute_signal_bound_s(made, job.graph, job.costs)
    if as_json:
        print_json(
            {
                "schedule": made.name,
                "rows": [[str(action) for action in row] for row in made.rows],
                "step_s": simulation.step_s,
                "signal_bound_s": signal_s,
                "bound_s": _bound_s(made, job),
                "num_live": [peak.num_live for peak in compute_peaks(made)],
                "waited_s": list(simulation.waited_s),
                "reason": reason,
            }
        )
        return
    if reason:
        say(reason)
    say_text(draw_text(simulation, width=max(width_of_terminal() - 12, 20)))
    bound_s = _bound_s(made, job)
    lines = [f"step {simulation.step_s:.6g}, with transfers in no time {signal_s:.6g}"]
    if bound_s is not None:
        lines.append(f"no schedule beats {bound_s:.6g}: {job.bound.reason}")
    lines.append("live micro-batches at most: " + ", ".join(str(peak.num_live) for peak in compute_peaks(made)))
    lines.append("waited for communication: " + ", ".join(f"{waited:.4g}" for waited in simulation.waited_s))
    say(*lines)


def _read_costs(path: Path) -> tuple[StageGraph, Costs]:
    form = read_json(path, "the costs in")
    if not isinstance(form, dict):
        raise PipelineError(
            f"reading the costs in {path}: expected an object with stages and edges, found {type(form).__name__}"
        )
    return read_costs(form)
