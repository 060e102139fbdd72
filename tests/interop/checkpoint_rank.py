"""One rank of a job that saves or loads with either package: ``checkpoint_rank.py PACKAGE ACTION DIRECTORY RANK SIZE``.

The same lines run with both packages; only the import differs. A load compares every value and ends with an error
where one is not as it was saved.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

PACKAGES = {"megatron": "megatron.core.dist_checkpointing", "remesh": "remesh.dist_checkpointing"}


def make_state(package: Any, rank: int, size: int, filled: bool, flattened: bool) -> dict[str, Any]:
    """A grid of two dims, replicas, several dtypes, prepended axes, objects, common data and, if asked, flat slices."""

    def tensor(values: torch.Tensor) -> torch.Tensor:
        return values if filled else torch.zeros_like(values)

    rows = torch.arange(24.0).reshape(4, 6) + 100 * rank
    layer = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2) - rank
    make = package.ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {
        "model": {
            "rows": make("rows", tensor(rows), (0, rank, size)),
            "columns": make("columns", tensor(rows.clone()), (1, rank, size)),
            "both": make("both", tensor(torch.arange(5)), replica_id=rank),
            "layer": make("layers", tensor(layer), (0, rank, size), prepend_axis_num=1),
            "flag": make("flag", tensor(torch.tensor([True, False, True])), replica_id=rank),
        },
        "list": [make("in.list", tensor(torch.arange(3, dtype=torch.int8)), replica_id=rank)],
        "rng": package.ShardedObject("rng", {"seed": rank} if filled else None, (size,), (rank,)),
        "step": 7,
        "args": {"lr": 0.5, "names": ["a", "b"]},
    }
    if flattened:
        cell = (torch.arange(12.0) + 12 * (rank // 2)).reshape(3, 4)
        held = slice(0, 5) if rank % 2 == 0 else slice(5, 12)
        flat = cell.reshape(-1)[held].clone()
        state["optimizer"] = package.ShardedTensor.from_rank_offsets_flat(
            "flat", tensor(flat), (3, 4), (1, rank // 2, size // 2), flattened_range=held
        )
    return state


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise AssertionError unless all values are equal to the bit."""
    for name, wanted in expected["model"].items():
        assert found["model"][name].dtype == wanted.dtype, name
        assert torch.equal(found["model"][name], wanted.data), name
    assert torch.equal(found["list"][0], expected["list"][0].data)
    assert found["rng"] == expected["rng"].data
    assert (found["step"], found["args"]) == (7, {"lr": 0.5, "names": ["a", "b"]})
    if "optimizer" in expected:
        assert torch.equal(found["optimizer"], expected["optimizer"].data)


def prepare_megatron() -> None:
    """Let its checkpoints be imported and used without a GPU, and without what else its package imports."""
    np.product = np.prod  # type: ignore[attr-defined]  # a NumPy that still has this name
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    above = importlib.import_module("megatron")
    core = types.ModuleType("megatron.core")
    core.__path__ = [str(Path(folder) / "core") for folder in above.__path__]
    sys.modules["megatron.core"] = core
    importlib.import_module("megatron.core.parallel_state")  # some releases want it before all others


def main(name: str, action: str, directory: str, rank: int, size: int) -> None:
    warnings.simplefilter("ignore")
    if name == "megatron":
        prepare_megatron()
    package = importlib.import_module(PACKAGES[name])
    dist.init_process_group("gloo", init_method=f"file://{directory}.{name}-{action}", rank=rank, world_size=size)
    kind, _, options = action.partition("-")
    flattened = "flat" in options
    if kind == "save":
        Path(directory).mkdir(exist_ok=True)
        dist.barrier()
        strategy = ("zarr", 1) if "zarr" in options else None
        package.save(make_state(package, rank, size, True, flattened), directory, strategy)
    else:
        # Replicas of a request are no fault here: every rank asks for what it holds.
        wanted = make_state(package, rank, size, False, flattened)
        check(package.load(wanted, directory), make_state(package, rank, size, True, flattened))
        assert set(package.load_common_state_dict(directory)) >= {"step", "args"}
        assert {"rows", "columns", "both", "layers"} <= set(package.load_tensors_metadata(directory))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
