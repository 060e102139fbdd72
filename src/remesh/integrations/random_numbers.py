"""Random states of all ranks as rows of tensors: Python's, NumPy's, torch's on CPU and device."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece

_NUM_PYTHON = 625
"""The number of words in the state of Python's generator; the last is its position."""


def random_rows() -> dict[str, Piece]:
    """This rank's row of every tensor, to be saved."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert version == 3 and len(words) == _NUM_PYTHON, "Python's generator has changed"
    integers = [*words, *keys.tolist(), position, has_gauss]  # type: ignore[union-attr]
    floats = [math.nan if gauss is None else gauss, cached]
    device = _device_module()
    return {
        "integers": _row_of(torch.tensor(integers, dtype=torch.int64, device="cpu")),
        "floats": _row_of(torch.tensor(floats, dtype=torch.float64, device="cpu")),
        "torch": _row_of(torch.get_rng_state()),
        **({} if device is None else {"device": _row_of(device.get_rng_state())}),
    }


def rows_to_load(stored: Mapping[str, Any], prefix: str = "random.") -> dict[str, Piece]:
    """This rank's rows that are among the stored tensors; none if another number of ranks has saved them."""
    rows = {name: row for name, row in random_rows().items() if f"{prefix}{name}" in stored}
    same = all(row.global_shape[0] == stored[f"{prefix}{name}"].global_shape[0] for name, row in rows.items())
    return rows if same else {}


def take_random_rows(rows: dict[str, Piece]) -> None:
    """Go on with the random numbers of loaded rows."""
    integers: list[int] = rows["integers"].tensor[0].tolist()
    gauss, cached = rows["floats"].tensor[0].tolist()
    random.setstate((3, tuple(integers[:_NUM_PYTHON]), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = integers[_NUM_PYTHON:]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(rows["torch"].tensor[0])
    if "device" in rows:
        _device_module().set_rng_state(rows["device"].tensor[0])


def _device_module() -> Any:
    """torch's module of this rank's device, such as ``torch.cuda``; None where there is only the CPU."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else torch.get_device_module(device)


def _row_of(values: torch.Tensor) -> Piece:
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    box = Box.at((rank, 0), (1, len(values)))
    return Piece(values[None].clone(), (num_ranks, len(values)), (Shard(0, box),))
