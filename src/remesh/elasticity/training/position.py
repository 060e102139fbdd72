"""Which samples next? The data position, counted globally so that it outlives every mesh.

Definitions. The *sample stream* is the concatenation of one permutation of the dataset per epoch; each permutation
follows from (seed, epoch) alone. A *position* is how many batches and samples of the stream are behind the job. The
batch after it is the next ``batch_size`` samples of the stream, whatever the mesh: batches run across the end of an
epoch, so none is short but the very last. A rank's *share* of a batch is a contiguous part of it that follows from the
number of data-parallel ranks.

Because the stream does not know the mesh, a change of world size can neither lose nor repeat a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from remesh.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Position:
    """The steps and samples that the job has completed."""

    step: int = 0
    """Batches resolved: taken by all ranks, or dropped by all. Invariant: >= 0."""
    samples: int = 0
    """Samples of the stream in those batches. Invariant: >= 0."""
    line: int = 0
    """The generation in which the job last began or went back: equal steps of two lines may be different states."""

    def after(self, num_samples: int) -> Position:
        """The position once a batch of this many samples is resolved."""
        return Position(self.step + 1, self.samples + num_samples, self.line)


@dataclass(frozen=True, slots=True)
class Share:
    """One data-parallel rank's part of a batch."""

    indices: tuple[int, ...]
    """Dataset indices to fetch. Never empty: a rank without a sample of its own borrows the first of the batch."""
    weight: float
    """Factor for a mean loss over ``indices``, so that the plain mean over ranks is the mean over the batch; 0 when the
    rank only borrows."""


def plan_batch(
    position: Position, *, num_samples: int, batch_size: int, seed: int, num_epochs: int | None
) -> tuple[int, ...]:
    """Dataset indices of the whole batch after ``position``; empty at the end of the stream."""
    if num_samples < 1 or batch_size < 1:
        raise ConfigError(f"planning batches of {batch_size} from {num_samples} samples: both must be at least 1")
    first = position.samples
    stop = first + batch_size
    if num_epochs is not None:
        stop = min(stop, num_epochs * num_samples)
    indices: list[int] = []
    while first < stop:
        epoch, at = divmod(first, num_samples)
        taken = min(stop - first, num_samples - at)
        indices.extend(_permutation(num_samples, seed, epoch)[at : at + taken].tolist())
        first += taken
    return tuple(indices)


def plan_share(batch: Sequence[int], *, dp_rank: int, dp_size: int) -> Share:
    """Part ``dp_rank`` of ``dp_size`` of a batch; parts differ by at most one sample, larger ones first."""
    base, extra = divmod(len(batch), dp_size)
    start = dp_rank * base + min(dp_rank, extra)
    part = tuple(batch[start : start + base + (dp_rank < extra)])
    if not part:
        return Share(tuple(batch[:1]), 0.0)
    return Share(part, len(part) * dp_size / len(batch))


def derive_seed(seed: int, *parts: int) -> int:
    """A 63-bit seed from a seed and any numbers, equal on every machine and release."""
    text = ":".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch. Philox is counter-based and its stream is stable across NumPy releases."""
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, epoch)))
    return np.argsort(generator.random(num_samples), kind="stable")
