"""Times of an image, an increment and a restore, against what the disk can do.

The bound of an image is the time that the same bytes take to be written in large blocks and flushed, measured in turn
with it, on the same disk; that of an increment also has the copy of as many pages, scattered in the same way, within
one process. The program holds random bytes, which nothing compresses.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import queue
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Journal, Row, is_quick, median_of, print_rows
from remesh.carried.images import (
    Command,
    ImageReport,
    Site,
    Upper,
    dump_image,
    restore_upper,
    start_upper,
)

_MIB = 1 << 20
_BLOCK_BYTES = 8 * _MIB
_SMALL_BLOCK_BYTES = 2 * _MIB
_NUM_WRITERS = 3
_PAGE_BYTES = 4096
_PATIENCE_S = 300.0
_PROGRAM = """
import os, sys, time
data = bytearray()
for _ in range(int(sys.argv[1])): data += os.urandom(1 << 20)
last = ""
while True:
    if os.path.exists("change") and (order := open("change").read()) != last and order.endswith("."):
        last = order
        step, run, number = map(int, order.rstrip(".").split())
        for start in range(0, len(data), step * 4096):
            for page in range(start, min(start + run * 4096, len(data)), 4096): data[page] ^= 255
        open(f"changed{number}", "w").close()
    open("ready", "w").close()
    time.sleep(0.01)
"""


@dataclass
class Bench:
    """A program of some size that runs as an upper half, and the folder of its images."""

    folder: Path
    num_mib: int
    upper: Upper
    site: Site
    num_changes: int = 0

    @classmethod
    def start(cls, folder: Path, num_mib: int) -> Bench:
        """Start the program; returns when it holds its data."""
        paths = [folder / name for name in ("channel", "out", "err")]
        for path in paths:
            path.touch()
        site = Site(*map(str, paths))
        argv = (sys.executable, "-c", _PROGRAM, str(num_mib))
        command = Command(argv, dict(os.environ), str(folder))
        bench = cls(folder, num_mib, start_upper(command, site), site)
        bench.wait_for("ready")
        return bench

    def wait_for(self, name: str) -> None:
        """Wait for a file that the program makes."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.folder / name).exists():
            if time.monotonic() > deadline or self.upper.poll() is not None:
                raise RuntimeError(f"the program did not make {name}: {Path(self.site.stderr_file).read_text()}")
            time.sleep(0.01)

    def change(self, step: int, run: int) -> None:
        """Let the program write to ``run`` of every ``step`` pages."""
        self.num_changes += 1
        (self.folder / "change").write_text(f"{step} {run} {self.num_changes}.")
        self.wait_for(f"changed{self.num_changes}")

    def write_plainly(self, num_bytes: int, flags: int = 0) -> float:
        """Seconds to write and flush as many bytes in large blocks."""
        block = _make_block(_BLOCK_BYTES)
        block[:] = os.urandom(_BLOCK_BYTES)
        began = time.perf_counter()
        with self._plain_file(flags) as descriptor:
            for _ in range(-(-num_bytes // _BLOCK_BYTES)):
                os.write(descriptor, block)
        return time.perf_counter() - began

    def copy_and_write(self, step: int, run: int) -> float:
        """Seconds to copy ``run`` of every ``step`` pages of as much memory, to write and to flush them past the cache.

        Each of three threads copies and writes its own block, as the engine does, so that the disk always has one.
        """
        pages = self.memory[: len(self.memory) // step * step].reshape(-1, step, _PAGE_BYTES)[:, :run]
        rows_per_block = max(_SMALL_BLOCK_BYTES // _PAGE_BYTES // run, 1)
        block_bytes = rows_per_block * run * _PAGE_BYTES
        free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(_NUM_WRITERS):
            free.put(np.frombuffer(_make_block(block_bytes), np.uint8))

        def write(number: int) -> None:
            rows, block = pages[number * rows_per_block : (number + 1) * rows_per_block], free.get()
            room = block[: rows.size]
            np.copyto(room.reshape(rows.shape), rows)
            os.pwrite(descriptor, room, number * block_bytes)
            free.put(block)

        began = time.perf_counter()
        with self._plain_file(os.O_DIRECT) as descriptor, ThreadPoolExecutor(_NUM_WRITERS) as writers:
            list(writers.map(write, range(-(-len(pages) // rows_per_block))))
        return time.perf_counter() - began

    @functools.cached_property
    def memory(self) -> np.ndarray:
        """As much memory as the program's, by pages."""
        return np.random.default_rng(0).integers(0, 256, (self.num_mib * _MIB // _PAGE_BYTES, _PAGE_BYTES), np.uint8)

    @contextlib.contextmanager
    def _plain_file(self, flags: int) -> Iterator[int]:
        """A new file, flushed at the end and removed."""
        path = self.folder / "plain"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()

    def dump(self, name: str, **how: Any) -> tuple[ImageReport, float]:
        """An image, and the seconds from the call to the return."""
        began = time.perf_counter()
        report = dump_image(self.upper.pid, self.folder / name, **how)
        return report, time.perf_counter() - began


def _make_block(num_bytes: int) -> memoryview:
    """Memory that is there, and aligned as O_DIRECT wants it."""
    block = memoryview(mmap.mmap(-1, num_bytes))
    block[:] = bytes(num_bytes)
    return block


def image_rows(bench: Bench, repeat: int) -> list[Row]:
    """Full images against the disk, in turn."""
    ratios, direct_ratios, stills, seconds = [], [], [], []
    for _ in range(repeat):
        report, took = bench.dump("image")
        ratios.append(took / bench.write_plainly(report.num_bytes))
        direct_ratios.append(took / bench.write_plainly(report.num_bytes, os.O_DIRECT))
        stills.append(took - report.seconds["inspect"])
        seconds.append(took)
        shutil.rmtree(bench.folder / "image")
    case = f"full image of {bench.num_mib} MiB"
    past_cache = f"{case} / the same past the page cache"
    return [
        median_of(f"{case} / the same bytes written and flushed", ratios, "ratio", 1.25, peer="write, fsync"),
        median_of(past_cache, direct_ratios, "ratio", peer="write with O_DIRECT, fsync"),
        median_of(case, seconds, "s"),
        median_of(f"{case}: the program stands still", stills, "s"),
    ]


def increment_rows(bench: Bench, repeat: int) -> list[Row]:
    """Increments with a tenth of the pages changed, in one piece of 64 pages out of 640, and one page of ten."""
    rows = []
    for step, run, how in ((640, 64, "in runs of 64"), (10, 1, "each tenth page")):
        sizes, times, bounds, over = [], [], [], []
        for _ in range(repeat):
            whole, whole_s = bench.dump("full", track=True)
            bench.change(step, run)
            part, part_s = bench.dump("part", previous=bench.folder / "full", track=True)
            bound_s = bench.copy_and_write(step, run)
            sizes.append(part.num_bytes / whole.num_bytes)
            times.append(part_s / whole_s)
            bounds.append(bound_s / whole_s)
            over.append(part_s / bound_s)
            shutil.rmtree(bench.folder / "full")
            shutil.rmtree(bench.folder / "part")
        what = f"increment, 10 % of {bench.num_mib} MiB changed {how}"
        bound = statistics.median(bounds)
        rows += [
            median_of(f"{what} / full image: bytes", sizes, "ratio", 0.15),
            median_of(f"{what} / full image: time", times, "ratio", 0.15, bound=bound),
            Row(f"the same pages copied, written, flushed / full image: time, {how}", bound, "ratio"),
            median_of(f"{what} / these alone: time", over, "ratio", bound=1.0),
        ]
    return rows


def restore_rows(bench: Bench, repeat: int) -> list[Row]:
    """From the call to the running process."""
    image = bench.folder / "image"
    dump_image(bench.upper.pid, image)
    bench.upper.close()
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        bench.upper = restore_upper(image, bench.site)
        seconds.append(time.perf_counter() - began)
        bench.upper.close()
    return [median_of(f"restore of {bench.num_mib} MiB", seconds, "s")]


def rows(*, num_mib: int, repeat: int) -> list[Row]:
    """All rows; needs the rights that `remesh mpi doctor` asks for."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-bench-"))
    try:
        bench = Bench.start(folder, num_mib)
        try:
            return [*image_rows(bench, repeat), *increment_rows(bench, repeat), *restore_rows(bench, repeat)]
        finally:
            bench.upper.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure, and put rows beside those of `benchmarks.mpi.images`, which is measured first."""
    quick = is_quick()
    found = rows(num_mib=64 if quick else 512, repeat=3 if quick else 7)
    print_rows(found)
    Journal("mpi_images", keeps=True).add(found)


if __name__ == "__main__":
    main()
