"""Time to agree on what a thousand ranks save: one of them, with what the others would send it.

First time: read what each rank sends (JSON), check that all shards fill their tensors exactly once, and on the first
rank put the index together from what was written. With the plan remembered: see that nothing has changed here, and read
the short answers of all. The network is not in it. Half of the tensors are cut in rows, half in columns with replicas,
so that ranks have several forms.

Beside it, two choices of who writes: among replicas in a data-parallel group, and for plain states.

`python -m benchmarks.checkpoint.planning` writes the report of docs/checkpoint/planning.md. Times are of one thread
that computes; where the machine is busy, those of the processor are more reliable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.report import Row, at_most, is_quick, write_report
from remesh.checkpoint.formats.index_files import encode_index
from remesh.checkpoint.plan.writes import HeldBoxes, Written, assemble_index, choose_writers
from remesh.checkpoint.values.outline import Outline, check_outlines, outline_of
from remesh.comm.agreement import Agreements
from remesh.dist_checkpointing.exchange_utils import _build_shard_distribution, _describe
from remesh.dist_checkpointing.mapping import ShardedTensor
from remesh.foundation.collector import collector_at_rest

_COPIES = 4
_GOALS_S = (5.0, 0.05)
"""For the first time and with the plan remembered, at 1,024 ranks with 1,000 tensors each."""


@dataclass(slots=True)
class Stopwatch:
    """Seconds of a block: by the clock, and of this process on a processor."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s


def entities_of(rank: int, num_ranks: int, num_tensors: int) -> list[ShardedTensor]:
    """What one rank holds."""
    entities = []
    num_parts = num_ranks // _COPIES
    for number in range(num_tensors):
        key = f"layers.{number // 10}.part{number % 10}.weight"
        if number % 2:
            start, shape, grid, replica = (8 * rank, 0), (8, 64), (num_ranks, 1), 0
            whole = (8 * num_ranks, 64)
        else:
            part, replica = divmod(rank, _COPIES)
            start, shape, grid, whole = (0, 8 * part), (16, 8), (1, num_parts), (16, 8 * num_parts)
        entities.append(ShardedTensor(key, None, torch.bfloat16, shape, whole, start, grid, replica))
    return entities


def planning(num_ranks: int, num_tensors: int, goals: tuple[float, float] | None = None) -> list[Row]:
    """Rows for one size of job; ``goals`` are seconds for the first time and with the plan remembered."""
    said = [_said(entities_of(rank, num_ranks, num_tensors), rank) for rank in range(num_ranks)]
    checking, assembling, encoding = Stopwatch(), Stopwatch(), Stopwatch()
    with collector_at_rest():
        with checking.running():
            # Of parts that are equal, the first rank that has them tells.
            parts: dict[str, Any] = {text: json.loads(text) for text in dict.fromkeys(one for of in said for one in of)}
            check_outlines([Outline.from_parts([parts[form], parts[numbers]]) for form, numbers, *_ in said])
        with assembling.running():
            written = [Written.from_parts([parts[text] for text in texts[2:]]) for texts in said]
            index = assemble_index([file for files in written for file in files])
        with encoding.running():
            encode_index(index).pickled("directory", "id")
    cached_s = _cached(entities_of(0, num_ranks, num_tensors), num_ranks)
    case = f"{num_ranks} ranks, {num_tensors} tensors each"
    planned_s, cpu_s = checking.wall_s + assembling.wall_s, checking.cpu_s + assembling.cpu_s
    first, again = f"{case}: planned and validated", f"{case}: again, with the plan remembered"
    rows = [Row(first, planned_s, "s"), Row(again, cached_s, "s")]
    if goals is not None:
        rows = [at_most(first, planned_s, "s", goals[0]), at_most(again, cached_s, "s", goals[1])]
    return [
        *rows,
        Row(f"{case}: planned and validated, of the processor", cpu_s, "s"),
        Row(f"{case}: of that, validated", checking.cpu_s, "s"),
        Row(f"{case}: index written to bytes", encoding.cpu_s, "s"),
    ]


def sharing(num_ranks: int, num_tensors: int) -> list[Row]:
    """Rows for the choice of who writes: one of the replicas in a group, and one holder of each box of plain states."""
    alike, apart = Stopwatch(), Stopwatch()
    entities = [
        ShardedTensor(f"layers.{number}.weight", None, torch.bfloat16, (16, 8), (16, 64), (0, 8), (1, 8))
        for number in range(num_tensors)
    ]
    told = _describe(dict(enumerate(entities)))  # type: ignore[arg-type]
    form = [(f"layers.{number}.weight", (8, 64), 1024) for number in range(num_tensors)]
    held = [HeldBoxes(form, [8 * rank, 0] * num_tensors) for rank in range(num_ranks)]
    with collector_at_rest():
        with alike.running():
            _build_shard_distribution([told] * num_ranks, ignore_groups=False)
        with apart.running():
            choose_writers(held, 0)
    case = f"{num_ranks} ranks, {num_tensors} tensors each"
    return [
        Row(f"{case}: replicas share the writing, of the processor", alike.cpu_s, "s"),
        Row(f"{case}: writers of plain states, of the processor", apart.cpu_s, "s"),
    ]


def growth(rows: list[Row], small: int, large: int, num_tensors: int) -> Row:
    """How much more than in proportion to the ranks the first plan costs; 1 is linear."""
    cost = {row.case: row.value for row in rows}
    name = "{} ranks, {} tensors each: planned and validated, of the processor"
    ratio = cost[name.format(large, num_tensors)] / cost[name.format(small, num_tensors)] * small / large
    return at_most(f"cost from {small} to {large} ranks, over linear", ratio, "ratio", 1.5)


def experiment(quick: bool) -> list[Row]:
    """All rows."""
    num_tensors = 100 if quick else 1000
    sizes = (64, 128, 256) if quick else (128, 256, 512, 1024, 2048)
    rows: list[Row] = []
    for num_ranks in sizes:
        rows += planning(num_ranks, num_tensors, _GOALS_S if num_ranks == 1024 else None)
        rows += sharing(num_ranks, num_tensors)
    return [*rows, growth(rows, sizes[0], sizes[-1], num_tensors)]


def _said(entities: list[ShardedTensor], rank: int) -> list[str]:
    """What a rank tells: the two parts of its outline, then the three of what it has written."""
    outline = outline_of(entities)
    rows, numbers, at, start = [], [], 0, 0
    for key, dtype, shape, whole, *_ in outline.form:
        *offset, is_main = outline.numbers[at : at + 3]
        at += 3
        if is_main:
            rows.append((key, dtype, shape, whole))
            numbers += [*offset, start, 1600]
            start += 1600
    told = [*outline.parts(), *Written(f"__{rank}_0.distcp", [], rows, [], numbers).parts()]
    return [json.dumps(part) for part in told]


def _cached(entities: list[ShardedTensor], num_ranks: int) -> float:
    """Seconds of a rank that finds its entities unchanged and hears the same of all others."""
    plans = Agreements()

    def produce() -> tuple[list[Any], None]:
        return outline_of(entities).parts(), None

    plans.remember(plans.agree(produce))
    answers = json.dumps([["0" * 32, ["1" * 32, "2" * 32], None]] * num_ranks)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        assert plans.agree(produce).told is None
        told = json.loads(answers)
        assert all(epoch == told[0][0] for epoch, _, _ in told)
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    write_report("checkpoint-planning", experiment(is_quick()))
