"""The state of each rank's random numbers (Python, NumPy, torch on the CPU) as rows of tensors, a row for each."""

from __future__ import annotations

import math
import random
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
    return {
        "integers": _row_of(torch.tensor(integers, dtype=torch.int64)),
        "floats": _row_of(torch.tensor(floats, dtype=torch.float64)),
        "torch": _row_of(torch.get_rng_state()),
    }


def take_random_rows(rows: dict[str, Piece]) -> None:
    """Go on with the random numbers of loaded rows."""
    integers: list[int] = rows["integers"].tensor[0].tolist()
    gauss, cached = rows["floats"].tensor[0].tolist()
    random.setstate((3, tuple(integers[:_NUM_PYTHON]), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = integers[_NUM_PYTHON:]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(rows["torch"].tensor[0])


def num_ranks_of(rows: Any) -> int:
    """The number of ranks whose rows a stored tensor has."""
    return int(rows.global_shape[0])


def _row_of(values: torch.Tensor) -> Piece:
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    box = Box.at((rank, 0), (1, len(values)))
    return Piece(values[None].clone(), (num_ranks, len(values)), (Shard(0, box),))
