"""The small training that both sides run: one MLP, steps of a fixed length."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn

WIDTH, BATCH_SIZE, SAVE_EVERY, STEP_S, NUM_SAMPLES = 64, 24, 20, 0.05, 10_000


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


def make_batch(step: int, rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


class Samples(torch.utils.data.Dataset):
    """What :func:`make_batch` makes, as a dataset."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return make_batch(index, 0, 1)[0]


@contextlib.contextmanager
def pace(length_s: float) -> Iterator[None]:
    """Make what is inside take at least this long, as a real step would."""
    until_s = time.monotonic() + length_s
    yield
    time.sleep(max(0.0, until_s - time.monotonic()))
