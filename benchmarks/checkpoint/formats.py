"""Costs of checksums, checks and conversions: one process, beside plain file operations on the same bytes.

The bound of a check is one read of the files, that of a conversion one read and one write with fsync. Files are in the
page cache. Rounds alternate, the least of each counts. The memory of a conversion is the highest that the process
reached beyond what it had before.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.checkpoint.storage import _clear, _write_raw, alternate
from benchmarks.report import Row, at_most
from remesh import dist_checkpointing
from remesh.checkpoint.run.conversion import Format, convert, gather_contents, open_any
from remesh.checkpoint.run.stored_values import BAND_BYTES
from remesh.checkpoint.storage.checked_file import verify
from remesh.checkpoint.storage.integrity import write_sha256_manifest
from remesh.dist_checkpointing import ShardedTensor

State = dict[str, torch.Tensor]


def sums_and_conversions(state: State, root: Path, repeat: int) -> list[Row]:
    """Rows of one state."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    size = f"{num_bytes >> 20} MiB"
    rows = _sums(size, state, root, repeat) + _conversions(size, root / "plain0", num_bytes, root, repeat)
    _clear(root)
    return rows


def _sums(size: str, state: State, root: Path, repeat: int) -> list[Row]:
    sharded = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state.items()}

    def save(directory: Path, *, verify_integrity: bool) -> None:
        directory.mkdir()
        dist_checkpointing.save(sharded, directory, verify_integrity=verify_integrity)

    def save_and_sum_afterwards(directory: Path) -> None:
        save(directory, verify_integrity=False)
        write_sha256_manifest(directory)

    plain, inline, after = alternate(
        [
            lambda at: save(root / f"plain{at}", verify_integrity=False),
            lambda at: save(root / f"inline{at}", verify_integrity=True),
            lambda at: save_and_sum_afterwards(root / f"after{at}"),
        ],
        repeat,
    )
    checked, raw = alternate([lambda at: list(verify(root / "plain0")), lambda at: _read_all(root / "plain0")], repeat)
    return [
        Row(f"{size}: save with SHA-256 over save", inline / plain, "ratio", bound=1.0),
        at_most(f"{size}: SHA-256 while writing over a pass afterwards", inline / after, "ratio", 1.0),
        Row(f"{size}: verify over raw read", checked / raw, "ratio", bound=1.0),
    ]


def _conversions(size: str, source: Path, num_bytes: int, root: Path, repeat: int) -> list[Row]:
    content = memoryview(bytearray(num_bytes))

    def copy_raw(at: int) -> None:
        _read_all(source)
        _write_raw(root / f"raw{at}", content)

    rows = []
    for to in (Format.TORCH_DIST, Format.SAFETENSORS, Format.ZARR):
        target = root / f"to-{to.value}"
        peaks: list[int] = []

        def write(at: int, to: Format = to, target: Path = target, peaks: list[int] = peaks) -> None:
            shutil.rmtree(target, ignore_errors=True)
            peaks.append(_peak_of(lambda: convert(gather_contents([open_any(source)]), target, to)))

        ours, raw = alternate([write, copy_raw], repeat)
        rows.append(Row(f"{size}: convert to {to.value} over raw read and write", ours / raw, "ratio", bound=1.0))
        case = f"{size}: convert to {to.value}, peak extra memory"
        rows.append(at_most(case, float(max(peaks)), "bytes", 3.0 * BAND_BYTES, bound=float(BAND_BYTES)))
    return rows


def _peak_of(act: Callable[[], object]) -> int:
    """Bytes by which the resident memory of this process rose above where it was; of no use below some MiB."""
    with suppress(OSError, AttributeError):  # freed memory that is kept would hide what is taken
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _read_all(directory: Path) -> None:
    buffer = bytearray(4 << 20)
    for entry in os.scandir(directory):
        with open(entry, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
