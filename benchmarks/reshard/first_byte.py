"""What does the whole way to the first byte take? From layouts to a checked plan, its digest, and one rank's steps.

``python -m benchmarks.reshard.first_byte`` measures each case in a process of its own, and writes
``docs/reshard/first_byte.md``; about a minute. The model is measured as `plan_reshard` plans it, tensor by tensor, and
as ranks do, who plan tensors that are alike as one. Beside it stands what ``remesh plan`` takes for the largest pair.
"""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import describe_run, header_of
from remesh.layout import Layout, Mesh, layout_from_spec
from remesh.resharding import Plan, TensorMove, Transfer, plan_reshard
from remesh.resharding.planning.transfer import plan_stacked

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reshard" / "first_byte.md"
_DEVICES = 8

# Spec, mesh, spec, mesh, shape: pairs that are awkward, for no dim divides as the other side's does.
PAIRS: Sequence[tuple[str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]] = (
    ("S01R", (128, 8), "RS01", (128, 8), (8192, 4096)),
    ("S01R", (125, 8), "RS01", (128, 8), (8000, 4100)),
    ("S01R", (500, 8), "S01R", (512, 8), (8192, 4096)),
    ("S02S1R", (8, 16, 8), "S1RS20", (16, 8, 8), (512, 512, 512)),
    ("S0R", (512, 8), "RS0", (512, 8), (8192, 4096)),
    ("S01R", (512, 8), "RS1", (512, 8), (8192, 4096)),
    ("S01R", (512, 8), "RS0", (512, 8), (8192, 4096)),
    ("S01R", (1024, 8), "RS0", (1024, 8), (8192, 4096)),
    ("S01R", (512, 8), "RS01", (512, 8), (8192, 4096)),
    ("S01R", (1024, 8), "RS01", (1024, 8), (8192, 8192)),
    ("S01R", (1000, 8), "RS01", (1024, 8), (8100, 8200)),
    ("S02S1R", (32, 32, 8), "S1RS20", (16, 64, 8), (500, 513, 1030)),
)
COMMAND: Sequence[str] = ("--shape", "8192,8192", "--src", "S01R@1024x8", "--dst", "RS01@1024x8:1024")
# A layer of a model of 405 billion parameters; FSDP is axis 0, tensor parallelism axis 1.
_LAYER: Mapping[str, tuple[tuple[int, ...], str]] = {
    **{name: ((16384, 16384), spec) for name, spec in (("wq", "S10R"), ("wo", "S0S1"))},
    **dict.fromkeys(("wk", "wv"), ((1024, 16384), "S10R")),
    **dict.fromkeys(("w1", "w3"), ((53248, 16384), "S10R")),
    "w2": ((16384, 53248), "S0S1"),
    **dict.fromkeys(("norm1", "norm2"), ((16384,), "S0")),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one case has taken."""

    name: str
    messages: int
    plan_s: float
    """Processor time from the layouts to the checked plan."""
    rest_s: float
    """The same from there to the steps of one giver and one taker: window, digest, messages."""
    peak_mib: float
    """Memory beyond what the imports take."""


Case = tuple[str, Sequence[TensorMove], Mapping[int, str]]
"""A name, what is to be moved, and the host of every rank."""


def pair_moves(number: int) -> Case:
    """One of the pairs: its name, its move, and the host of every rank."""
    src, src_mesh, dst, dst_mesh, shape = PAIRS[number]
    first = _mesh(src_mesh, 0)
    second = _mesh(dst_mesh, len(first.world_ranks))
    move = TensorMove(
        "w", layout_from_spec(src, shape, first, "float32"), layout_from_spec(dst, shape, second, "float32")
    )
    name = f"{src} @ {'x'.join(map(str, src_mesh))} to {dst} @ {'x'.join(map(str, dst_mesh))}"
    return name, [move], _hosts(len(first.world_ranks) + len(second.world_ranks))


def model_moves(num_layers: int, *, scale: int = 1) -> Case:
    """A model from TP8 x PP16 x FSDP64 to TP4 x PP8 x FSDP256; ``scale`` divides the FSDP axes."""
    sides = [_model(num_layers, tp, pp, fsdp // scale) for tp, pp, fsdp in ((8, 16, 64), (4, 8, 256))]
    moves = [TensorMove(name, layout, sides[1][name]) for name, layout in sides[0].items()]
    name = f"{num_layers} layers x {len(_LAYER)} tensors, TP8 x PP16 x FSDP64 to TP4 x PP8 x FSDP256"
    return name, moves, _hosts(8 * 16 * 64 // scale)


def measure(case: Case, started_s: float, base_mib: float) -> Cost:
    """Plan these moves and make them ready to run."""
    name, moves, hosts = case
    plan = plan_reshard(moves, hosts)
    planned_s = time.thread_time()
    return _cost_of(name, plan, Transfer.of(plan), hosts, (started_s, planned_s, base_mib))


def measure_stacked(case: Case, started_s: float, base_mib: float) -> Cost:
    """The same as ranks do it: tensors that are alike are planned as one."""
    name, moves, hosts = case
    transfer = plan_stacked(moves, hosts, {})
    planned_s = time.thread_time()
    return _cost_of(f"{name}; alike ones as one", transfer.plan, transfer, hosts, (started_s, planned_s, base_mib))


def _cost_of(
    name: str, plan: Plan, transfer: Transfer, hosts: Mapping[int, str], since: tuple[float, float, float]
) -> Cost:
    """With the rest of the way; ``since`` are the seconds at the start and behind the plan, and MiB at the start."""
    started_s, planned_s, base_mib = since
    _ = transfer.digest, transfer.last_rank, transfer.steps_of(min(hosts)), transfer.steps_of(max(hosts))
    ready_s = time.thread_time()
    return Cost(name, len(plan.messages), planned_s - started_s, ready_s - planned_s, _peak_mib() - base_mib)


def measure_case(number: int) -> Cost:
    """One of the pairs, or the model, which comes behind them, in both ways."""
    started_s, base_mib = time.thread_time(), _peak_mib()
    if number < len(PAIRS):
        return measure(pair_moves(number), started_s, base_mib)
    act = measure if number == len(PAIRS) else measure_stacked
    return act(model_moves(126), started_s, base_mib)


def measure_command(arguments: Sequence[str]) -> tuple[float, float]:
    """Processor time, in seconds, and peak memory, in MiB, of ``remesh plan``, with all that it loads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "remesh", "plan", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken_s, after.ru_maxrss / 1024


_REASONS = """

Where pieces of both sides lie within hosts and there are more than 8,192 slices, a plan follows a rule and names none
of them ([decision 2](../decisions/0002-plans.md)): most of the time is that of the layouts,
their hosts and the digest, and the rest grows with what one rank gives and takes. Ranks plan tensors that are alike as
one ([decision 2](../decisions/0002-plans.md)). Other plans name every slice in
columns, nine numbers of eight bytes each, and every pair of hosts
([decision 2](../decisions/0002-plans.md)): `S01R` to `RS1`, whose pieces every host wants, and the
model, whose streams are longer than a message.
"""


def page_text(costs: Sequence[Cost], command: tuple[float, float], about: str = "") -> str:
    """The costs as Markdown, and what the command takes."""
    rows = [
        f"| {each.name} | {each.messages:,} | {each.plan_s:.2f} | {each.rest_s:.2f} | {each.peak_mib:.0f} |"
        for each in costs
    ]
    return (
        "# The way to the first byte\n\n"
        f"{about}\n\nSeconds of processor time, from the layouts to a checked plan, and from there to the digest "
        "and the steps of two\nranks; MiB beyond what imports take. Goals at 1,024 hosts: 2 s and 300 MiB; for the "
        "model 5 s and 512 MiB.\n\n| move | messages | to the plan, s | to the first byte, s | MiB |\n"
        "|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n`remesh plan {' '.join(COMMAND)}` takes {command[0]:.1f} s of processor time and {command[1]:.0f} MiB, "
        "with all that it loads." + _REASONS
    )


def main(page: Path = _PAGE) -> None:
    """Measure every case, and write the page."""
    context = multiprocessing.get_context("spawn")
    costs = []
    # Before the others, so that the largest child there has been is this one.
    command = measure_command(COMMAND)
    for number in range(len(PAIRS) + 2):
        with context.Pool(1) as pool:
            costs.append(pool.apply(measure_case, (number,)))
        print(costs[-1], flush=True)
    about = header_of(describe_run(None), "python -m benchmarks.reshard.first_byte", "one of each move")
    page.write_text(page_text(costs, command, about))


def _mesh(shape: Sequence[int], first: int) -> Mesh:
    num_ranks = 1
    for size in shape:
        num_ranks *= size
    return Mesh.of({f"axis{axis}": size for axis, size in enumerate(shape)}, range(first, first + num_ranks))


def _model(num_layers: int, tp: int, pp: int, fsdp: int) -> dict[str, Layout]:
    meshes = [_mesh((fsdp, tp), stage * fsdp * tp) for stage in range(pp)]
    made: dict[tuple[int, tuple[int, ...], str], Layout] = {}
    tensors = {}
    for layer in range(num_layers):
        stage = layer * pp // num_layers
        for name, (shape, spec) in _LAYER.items():
            key = (stage, shape, spec)
            if key not in made:
                made[key] = layout_from_spec(spec, shape, meshes[stage], "bfloat16")
            tensors[f"layers.{layer}.{name}"] = made[key]
    return tensors


def _hosts(num_ranks: int) -> dict[int, str]:
    return {rank: f"h{rank // _DEVICES:05}" for rank in range(num_ranks)}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
