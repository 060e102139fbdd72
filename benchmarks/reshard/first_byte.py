"""Time to the first byte: from layouts to a checked plan, its digest, and one rank's steps.

``python -m benchmarks.reshard.first_byte`` measures each case in a process of its own, and writes the report of
docs/reshard/first_byte.md; about a minute. The model is measured as `plan_reshard` plans it, tensor by tensor, and
as ranks do, who plan tensors that are alike as one. Beside it stands what ``remesh plan`` takes for the largest pair.
"""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Row, write_report
from remesh.layout import Layout, Mesh, layout_from_spec
from remesh.resharding import Plan, TensorMove, Transfer, plan_reshard
from remesh.resharding.planning.transfer import plan_stacked

_DEVICES = 8

# Spec, mesh, spec, mesh, shape: pairs that are awkward, for no dim divides as the other side's does.
PAIRS: Sequence[tuple[str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]] = (
    ("S01R", (128, 8), "RS01", (128, 8), (8192, 4096)),
    ("S01R", (125, 8), "RS01", (128, 8), (8000, 4100)),
    ("S01R", (500, 8), "S01R", (512, 8), (8192, 4096)),
    ("S02S1R", (8, 16, 8), "S1RS20", (16, 8, 8), (512, 512, 512)),
    ("S0R", (512, 8), "RS0", (512, 8), (8192, 4096)),
    # Replicas of each piece on two hosts, which take turns.
    ("S0R", (512, 16), "RS01", (512, 16), (8192, 8192)),
    # And wanted on two hosts each: no rule.
    ("S0R", (512, 16), "RS0", (512, 16), (8192, 8192)),
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


def rows_of(costs: Sequence[Cost]) -> Iterator[Row]:
    """Four rows of each case."""
    for cost in costs:
        yield Row(f"{cost.name}: messages", cost.messages, "messages")
        yield Row(f"{cost.name}: to the plan", cost.plan_s, "s")
        yield Row(f"{cost.name}: to the first byte", cost.rest_s, "s")
        yield Row(f"{cost.name}: memory", cost.peak_mib * (1 << 20), "bytes")


def main() -> None:
    """Measure every case, and write the report."""
    context = multiprocessing.get_context("spawn")
    # Before the others, so that the largest child there has been is this one.
    command_s, command_mib = measure_command(COMMAND)
    rows = []
    for number in range(len(PAIRS) + 2):
        with context.Pool(1) as pool:
            rows += rows_of([pool.apply(measure_case, (number,))])
    about = f"`remesh plan {' '.join(COMMAND)}`"
    rows.append(Row(f"{about}: to the plan", command_s, "s"))
    rows.append(Row(f"{about}: memory", command_mib * (1 << 20), "bytes"))
    write_report("reshard-first-byte", rows)


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
