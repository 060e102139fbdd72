"""Time of the common refinement of two layouts, from 4 ranks a side to 16,384, of layouts never seen before.

Every measurement starts from fresh ``Layout`` values, so grouping shards to atoms is part of it; building the
shards is not, and has a row of its own. All slices are made (their arrays, not one Python object each).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Row, at_least, at_most, spread_of
from remesh.layout import (
    Box,
    Layout,
    Mesh,
    Shard,
    Split,
    StridedSplit,
    boxes_of_flat_range,
    compute_overlap,
    layout_from_placements,
    layout_from_spec,
)

GOAL_S = {1024: 0.050, 16384: 1.0}
"""Seconds for regular shards, by number of ranks on a side."""


@dataclass(frozen=True, slots=True)
class Timing:
    best_s: float
    spread: float
    """Largest over smallest, minus 1."""


def time_of(run: Callable[[], object], num_runs: int = 5) -> Timing:
    """The best of several runs."""
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return Timing(min(seconds), spread_of(seconds))


def overlap_of_fresh(src: Layout, dst: Layout) -> int:
    """Number of slices of two layouts, without anything remembered from before."""
    return len(compute_overlap(replace(src), replace(dst)))


def flat_ranges(shape: tuple[int, ...], cuts: Sequence[int], dtype: str) -> Layout:
    """The flattened tensor cut here, a range for each rank, which keeps its boxes one after the other."""
    shards = []
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        at = 0
        for box in boxes_of_flat_range(Box.of_shape(shape), start, stop):
            shards.append(Shard(rank, box, at))
            at += box.size
    return Layout(shape, tuple(shards), dtype)


def pairs(side: int) -> dict[str, tuple[Layout, Layout]]:
    """Pairs of layouts of ``side ** 2`` ranks on a square mesh; the last two are not regular."""
    num_ranks = side * side
    shape = (num_ranks, num_ranks)
    mesh = Mesh.of({"a": side, "b": side})
    rows = layout_from_spec("S01R", shape, mesh, "float32")
    grid = layout_from_spec("S0S1", shape, mesh, "float32")
    uneven = (num_ranks - 7, num_ranks - 5)
    cuts = [0, *(rank * num_ranks + 3 for rank in range(1, num_ranks)), num_ranks * num_ranks]
    flat = flat_ranges(shape, cuts, "float32")
    found = {
        "same rows": (rows, rows),
        "grid to its transpose": (grid, layout_from_spec("S1S0", shape, mesh, "float32")),
        "replicas to grid": (layout_from_spec("S0R", shape, mesh, "float32"), grid),
        "rows to grid": (rows, grid),
        "uneven grid to uneven columns": (
            layout_from_placements(uneven, mesh, (Split(0), Split(1)), "float32"),
            layout_from_placements(uneven, mesh, (Split(1), Split(1)), "float32"),
        ),
        "FSDP over TP to TP": (
            layout_from_placements(shape, mesh, (StridedSplit(0, side), Split(0)), "float32"),
            layout_from_spec("S1R", shape, mesh, "float32"),
        ),
        "flat ranges to rows": (flat, rows),
        "flat ranges to grid": (flat, grid),
    }
    if num_ranks <= 1024:
        # A million slices; for 16,384 ranks it would be 268 million.
        found["rows to columns"] = (rows, layout_from_spec("RS01", shape, mesh, "float32"))
    return found


def overlaps(side: int) -> list[Row]:
    """One row per pair of layouts of ``side ** 2`` ranks."""
    rows = []
    num_ranks = side * side
    for name, (src, dst) in pairs(side).items():
        num_slices = overlap_of_fresh(src, dst)
        timing = time_of(lambda src=src, dst=dst: overlap_of_fresh(src, dst))  # type: ignore[misc]
        case = f"{num_ranks:,} x {num_ranks:,}, {name}, {num_slices:,} slices"
        if num_ranks in GOAL_S:
            rows.append(at_most(case, timing.best_s, "s", GOAL_S[num_ranks], spread=timing.spread))
        else:
            rows.append(Row(case, timing.best_s, "s", spread=timing.spread))
    return rows


def small_tensors(num_tensors: int) -> list[Row]:
    """A state dict on four ranks, tensor by tensor."""
    mesh = Mesh.of({"dp": 2, "tp": 2})
    src = layout_from_placements((64, 64), mesh, (StridedSplit(0, 2), Split(0)), "float32")
    dst = layout_from_placements((64, 64), mesh, (Split(1), Split(0)), "float32")
    timing = time_of(lambda: [overlap_of_fresh(src, dst) for _ in range(num_tensors)])
    case = f"{num_tensors} tensors on 4 ranks, seconds per tensor"
    return [at_most(case, timing.best_s / num_tensors, "s", 0.001, spread=timing.spread)]


def against_comparing_all(side: int) -> list[Row]:
    """How many times faster than intersecting every pair of boxes."""
    mesh = Mesh.of({"a": side, "b": side})
    src = layout_from_spec("S0S1", (4096, 4096), mesh, "float32")
    dst = layout_from_spec("S1S0", (4096, 4096), mesh, "float32")

    def compare_all() -> int:
        return sum(a.box.intersect(b.box) is not None for a in src.shards for b in dst.shards)

    assert compare_all() == overlap_of_fresh(src, dst)
    ratio = time_of(compare_all, 2).best_s / time_of(lambda: overlap_of_fresh(src, dst)).best_s
    case = f"{side * side:,} x {side * side:,}, times faster than comparing all pairs"
    return [at_least(case, ratio, "ratio", 1.0, peer="Box.intersect of every pair")]


def building(side: int) -> list[Row]:
    """Seconds to make the shards of a layout in the first place."""
    mesh = Mesh.of({"a": side, "b": side})
    timing = time_of(lambda: layout_from_placements((4096, 4096), mesh, (Split(0), Split(1)), "float32"), 3)
    return [Row(f"layout of {side * side:,} ranks from placements", timing.best_s, "s", spread=timing.spread)]
