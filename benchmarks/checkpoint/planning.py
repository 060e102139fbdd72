"""How long does it take to agree on what a thousand ranks save? One of them, with what the others would tell it.

First time: read what each rank tells (JSON), check that all shards fill their tensors exactly once, and on the first
rank put the index together from what was written. With the plan remembered: see that nothing has changed here, and
read the short answers of all. The network is not in it. Half of the tensors are cut in rows, half in columns with
replicas, so that ranks have several forms.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from benchmarks.report import Row, at_most
from remesh.dist_checkpointing.collector import collector_at_rest
from remesh.dist_checkpointing.mapping import ShardedTensor
from remesh.dist_checkpointing.outline import Outline, check_outlines, outline_of
from remesh.dist_checkpointing.plan_cache import PlanCache
from remesh.dist_checkpointing.strategies.index_pickle import encode_index
from remesh.dist_checkpointing.writes import Written, assemble_index

_COPIES = 4


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
    with collector_at_rest():
        started = time.perf_counter()
        parts: dict[str, Any] = {}
        for texts in said:  # of parts that are equal, the first rank that has them tells
            for text in texts:
                parts.setdefault(text, None)
        parts = {text: json.loads(text) for text in parts}
        check_outlines([Outline.from_parts([parts[form], parts[numbers]]) for form, numbers, *_ in said])
        checked_s = time.perf_counter() - started
        started = time.perf_counter()
        written = [Written.from_parts([parts[text] for text in texts[2:]]) for texts in said]
        index = assemble_index([file for files in written for file in files])
        planned_s = time.perf_counter() - started + checked_s
        started = time.perf_counter()
        encode_index(index).pickled("directory", "id")
        encoded_s = time.perf_counter() - started
    cached_s = _cached(entities_of(0, num_ranks, num_tensors), num_ranks)
    case = f"{num_ranks} ranks, {num_tensors} tensors each"
    first, again = f"{case}: planned and validated", f"{case}: again, with the plan remembered"
    rows = [Row(first, planned_s, "s"), Row(again, cached_s, "s")]
    if goals is not None:
        rows = [at_most(first, planned_s, "s", goals[0]), at_most(again, cached_s, "s", goals[1])]
    return [
        *rows,
        Row(f"{case}: of that, validated", checked_s, "s"),
        Row(f"{case}: index written to bytes", encoded_s, "s"),
    ]


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
    file = f"__{rank}_0.distcp"
    told = [*outline.parts(), *Written(file, [], rows, [], numbers).parts()]
    return [json.dumps(part) for part in told]


def _cached(entities: list[ShardedTensor], num_ranks: int) -> float:
    """Seconds of a rank that finds its entities unchanged and hears the same of all others."""
    plans = PlanCache()

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
