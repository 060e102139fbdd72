"""``python -m benchmarks.memory [--device cuda]``: docs/memory.md, the bytes of each verb, planned and measured.

Two ranks; with one GPU they share it. On the CPU the pages that the system counts are measured, on a device what its
allocator gives away. ``QUICK=1`` for a smaller state.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory.verbs import VERBS, Told, measure
from benchmarks.report import Row, at_most, describe_run, header_of, is_quick, write_report
from remesh.testbed.pool import RankPool

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
NUM_RANKS = 2
STATE_BYTES = 256 << 20
ALLOWED_BYTES = 8 << 20
"""What allocators, threads and messages may take beside."""
_MIB = 1 << 20


def main() -> None:
    """Measure every verb, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    state_bytes = STATE_BYTES // (4 if is_quick() else 1)
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        told = {verb: most_of(pool, verb, state_bytes, Path(folder), device) for verb in VERBS}
    write_report("memory" if device == "cpu" else "memory-cuda", list(rows_of(told)))
    if device == "cpu":
        PAGE.write_text(page_of(told, state_bytes, describe_run(None)))


def most_of(pool: RankPool, verb: str, state_bytes: int, folder: Path, device: str = "cpu") -> Told:
    """One verb: of the rank that took most beyond what it had planned."""
    place = folder / verb.replace(" ", "-")
    told: Sequence[Told] = pool.run(measure, NUM_RANKS, (verb, state_bytes, place, device))
    return max(told, key=lambda one: one.measured - one.planned)


def rows_of(told: Mapping[str, Told]) -> Iterator[Row]:
    """What each verb took beyond its plan."""
    for verb, one in told.items():
        yield at_most(f"{verb}: measured", one.measured, "bytes", one.planned + ALLOWED_BYTES, bound=one.planned)


def page_of(told: Mapping[str, Told], state_bytes: int, run: Mapping[str, Any]) -> str:
    """The page as text."""
    lines = [
        "# Memory",
        "",
        header_of(run, "python -m benchmarks.memory", f"each verb once, {NUM_RANKS} ranks; the rank that took most"),
        "",
        f"A rank's part of the state has {state_bytes // _MIB} MiB. *Planned* is what a verb needs by its own count, "
        "the state among it; *measured* the most that the process had beyond what it had before the state was "
        f"made. Beside the plan allocators, threads and messages may take {ALLOWED_BYTES // _MIB} MiB. On GPUs "
        "`python -m benchmarks.memory --device cuda` measures what their allocator gives away: not run yet.",
        "",
        "| verb | planned, MiB | measured, MiB | measured, in parts of the state |",
        "|---|---|---|---|",
    ]
    for verb, one in told.items():
        parts = [f"{value / _MIB:.0f}" for value in (one.planned, one.measured)]
        lines.append(f"| {verb} | {' | '.join(parts)} | {one.measured / state_bytes:.2f} |")
    lines += [
        "",
        "Windows have an eighth of the state. `job.carry` moves parameters and their Adam; a fresh Adam makes "
        "moments by a step with gradients of zeros, which come on top of a window. Staging of a reshard is bounded by "
        "`max_staging_bytes`, windows by `window_bytes`: [running plans](reshard/running.md), "
        "[elastic jobs](elastic/index.md). `tests/gpu/test_memory.py` holds each verb to its plan.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
