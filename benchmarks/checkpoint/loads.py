"""Load times of large tensors, while memory is new and while it is kept: a process for each, beside native DCP.

Native DCP reads large tensors into memory of its own first, so its time depends on where that comes from: pages that
the C library has kept from earlier calls, or new ones, which the system must fill with zeros, as in a program that has
just started. Left to itself the library does either, by chance (between none and 65,568 faults of pages for the same
256 MiB), so each is asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import remesh
from benchmarks.checkpoint.storage import alternate, native_load, native_save, read_raw
from benchmarks.report import Row, at_least

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 300
_KEPT_BYTES = {"new": 128 << 10, "kept": 1 << 30}
"""Memory is given back to the system at once in pieces of at least this size."""


def load_by_memory(num_tensors: int, shape: tuple[int, int], repeat: int) -> list[Row]:
    """Rows of float32 tensors of one shape."""
    rows = []
    for memory, kept_bytes in _KEPT_BYTES.items():
        settings = (f"glibc.malloc.{name}_threshold={kept_bytes}" for name in ("mmap", "trim"))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.checkpoint.loads", *map(str, (num_tensors, *shape, repeat))],
            env=os.environ | {"GLIBC_TUNABLES": ":".join(settings)},
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            timeout=_PATIENCE_S,
            check=True,
        )
        ours, theirs, raw = json.loads(done.stdout)
        case = f"{num_tensors * shape[0] * shape[1] * 4 >> 20} MiB in {num_tensors} tensors, memory {memory}: load"
        rows += [
            at_least(f"{case}, DCP over ours", theirs / ours, "ratio", 3.0, peer="torch DCP"),
            Row(f"{case} over raw read", ours / raw, "ratio", bound=1.0),
            Row(case, ours, "s"),
        ]
    return rows


def seconds_of_loads(state: dict[str, torch.Tensor], root: Path, repeat: int) -> list[float]:
    """Of loads by us and by native DCP, and of a raw read."""
    remesh.save(state, root / "ours")
    native_save(state, root / "native")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    buffer = bytearray(sum(tensor.nbytes for tensor in state.values()))
    return alternate(
        [
            lambda at: remesh.load(dict(target), root / "ours"),
            lambda at: native_load(dict(target), root / "native"),
            lambda at: read_raw(root / "ours" / "__0_0.distcp", buffer),
        ],
        1 + repeat,  # in the first round memory becomes there that is to be kept
    )


def main() -> None:
    num_tensors, num_rows, num_columns, repeat = map(int, sys.argv[1:])
    state = {f"t{at:02d}": torch.randn(num_rows, num_columns) for at in range(num_tensors)}
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        print(json.dumps(seconds_of_loads(state, Path(folder), repeat)))


if __name__ == "__main__":
    main()
