"""What is filled in place needs no second state: private memory beside it, while a load and a refit go on."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.testing.pool import RankPool

pytestmark = pytest.mark.procs

NUM_TENSORS, SHAPE = 16, (512, 2048)
STATE_BYTES = NUM_TENSORS * SHAPE[0] * SHAPE[1] * 4
LEAST_TOLD = 8 << 20
"""What allocators and threads may take beside."""


class Peak:
    """Most private memory of this process that is no file's, beyond what it has at the beginning."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._before = self._most = private_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.extra_bytes = max(self._most, private_bytes()) - self._before

    def _look(self) -> None:
        while not self._is_over.wait(0.0005):
            self._most = max(self._most, private_bytes())


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def state_of(dim: int, value: float) -> dict[str, torch.Tensor | Piece]:
    """This rank's rows, or columns, of every tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start, stop = [0, 0], list(SHAPE)
    start[dim], stop[dim] = rank * SHAPE[dim] // size, (rank + 1) * SHAPE[dim] // size
    box = Box(tuple(start), tuple(stop))
    return {f"t{n}": Piece(torch.full(box.shape, value), SHAPE, (Shard(0, box),)) for n in range(NUM_TENSORS)}


def are_all(state: dict[str, torch.Tensor | Piece], value: float) -> bool:
    return all(piece.tensor.eq(value).all() for piece in state.values() if isinstance(piece, Piece))


def load_columns_of_rows(folder: Path) -> int:
    remesh.save(state_of(0, 3.0), folder)
    take = state_of(1, 0.0)
    with Peak() as peak:
        remesh.load(take, folder)
    assert are_all(take, 3.0)
    return peak.extra_bytes


def test_a_load_in_another_layout_holds_no_second_state(ranks: RankPool, tmp_path: Path) -> None:
    for extra_bytes in ranks.run(load_columns_of_rows, 2, (tmp_path / "c",)):
        assert extra_bytes <= STATE_BYTES // 2 // 4 + LEAST_TOLD, f"{extra_bytes >> 20} MiB"


def push_columns_of_rows(staging_bytes: int) -> list[int]:
    give = state_of(0, 5.0)
    refit = remesh.Refit(state_of(1, 0.0), max_staging_bytes=staging_bytes)
    extra = []
    for version in (1, 2, 3):
        with Peak() as peak:
            refit.push(give, version)
        extra.append(peak.extra_bytes)
    with refit.read() as weights:
        assert are_all(dict(weights.tensors), 5.0)
    return extra


def test_a_refit_takes_its_two_buffers_and_the_staging_that_was_allowed(ranks: RankPool) -> None:
    staging_bytes = 4 << 20
    for extra in ranks.run(push_columns_of_rows, 2, (staging_bytes,)):
        assert max(extra) <= staging_bytes + LEAST_TOLD, extra
