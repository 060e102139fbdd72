"""Most memory that a process had while something went on, beyond what it had before: of its host, or of its device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_MMAP_THRESHOLD = -3
"""What `mallopt` takes for the size from which blocks are the system's again as soon as they are free."""
_LARGE_BYTES, _LARGEST_BYTES = 256 << 10, 32 << 20
"""That size while memory is measured, and the one at which the C library's own rule ends."""
_FORGET_PEAK = "5"
"""What the system takes, in ``clear_refs``, for a word to count the peak anew."""


@dataclass
class Peak:
    """Bytes at the most beyond those at the beginning; known when the context is over."""

    bytes: int = 0


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Of the device's allocator, or of the pages that the system counts as this process's."""
    gc.collect()
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    library.malloc_trim(0)  # what the C library keeps counts as the process's, too
    Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
    before = _of_process("VmRSS")
    yield peak
    peak.bytes = _of_process("VmHWM") - before
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)


def _of_process(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
