"""All experiments of the room; ``QUICK=1`` for the smaller set."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.checkpoint import background, formats, loads, planning, storage
from benchmarks.report import is_quick, write_report


def main() -> None:
    quick = is_quick()
    repeat = 3 if quick else 5
    large = {f"t{at:02d}": torch.randn(1024, 512 if quick else 2048) for at in range(32)}
    small = {f"t{at:04d}": torch.randn(1024) for at in range(1000 if quick else 4000)}
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        root = Path(folder)
        size = f"{sum(tensor.nbytes for tensor in large.values()) >> 20} MiB in 32 tensors"
        rows = storage.save_and_load(size, large, root, repeat, (1.25, 1.0, None))
        rows += storage.save_and_load(f"{len(small)} tensors of 4 KiB", small, root, repeat, (None, 20.0, 20.0))
        rows += storage.reading_the_index(64 if quick else 512, 200, root, repeat)
        rows += storage.parts_of_a_chunk(4096 if quick else 8192, root, repeat)
        rows += background.blocked_time(large, root, repeat)
        if not quick:
            larger = {f"t{at:02d}": torch.randn(4096, 2048) for at in range(32)}
            rows += background.blocked_time(larger, root, repeat, ("thread",))
            del larger
        rows += formats.sums_and_conversions(large, root, repeat)
    rows += planning.experiment(quick)
    rows += loads.load_by_memory(32, (1024, 512 if quick else 2048), repeat)
    write_report("checkpoint", rows)


if __name__ == "__main__":
    main()
