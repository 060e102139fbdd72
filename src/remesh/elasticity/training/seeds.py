"""Random state of a worker process, set from numbers that do not know the mesh."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), Python and NumPy."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # What the other does to the processor's generator. It looks for all kinds of devices first, in 0.15 ms a step.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
