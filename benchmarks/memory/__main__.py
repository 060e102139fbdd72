"""``python -m benchmarks.memory [--device cuda]``: the bytes of each verb, planned and measured, for docs/memory.md.

Two ranks; with one GPU they share it. On the CPU the pages that the system counts are measured, on a device what its
allocator gives away. ``QUICK=1`` for a smaller state.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.memory.verbs import VERBS, Told, measure
from benchmarks.report import Row, at_most, is_quick, write_report
from remesh.testbed.pool import RankPool

NUM_RANKS = 2
STATE_BYTES = 256 << 20
ALLOWED_BYTES = 8 << 20
"""What allocators, threads and messages may take beside."""


def main() -> None:
    """Measure every verb, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    state_bytes = STATE_BYTES // (4 if is_quick() else 1)
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        told = {verb: most_of(pool, verb, state_bytes, Path(folder), device) for verb in VERBS}
    room = "memory" if device == "cpu" else "memory-cuda"
    write_report(room, list(rows_of(told, state_bytes)), notes=[f"{state_bytes >> 20} MiB of state a rank"])


def most_of(pool: RankPool, verb: str, state_bytes: int, folder: Path, device: str = "cpu") -> Told:
    """One verb: of the rank that took most beyond what it had planned."""
    place = folder / verb.replace(" ", "-")
    told: Sequence[Told] = pool.run(measure, NUM_RANKS, (verb, state_bytes, place, device))
    return max(told, key=lambda one: one.measured - one.planned)


def rows_of(told: Mapping[str, Told], state_bytes: int) -> Iterator[Row]:
    """What each verb has planned, and what it took."""
    for verb, one in told.items():
        yield Row(f"{verb}: planned", one.planned, "bytes")
        yield at_most(f"{verb}: measured", one.measured, "bytes", one.planned + ALLOWED_BYTES, bound=one.planned)
        yield Row(f"{verb}: in parts of the state", one.measured / state_bytes, "ratio")


if __name__ == "__main__":
    main()
