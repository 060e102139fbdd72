"""Two jobs that save into one directory, the second 0 to 60 ms after the first: ``two_jobs.py FOLDER SEED TRIALS``."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.run.reader import why_incomplete
from remesh.checkpoint.storage.checked_file import verify
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.foundation.errors import StorageError

_NUM_RANKS = 2
_ROWS = 40_000
_LATEST_S = 0.06
_GROUP_TIMEOUT = timedelta(seconds=40)
"""Well before whoever runs this gives up: a rank that failed is told of, and not that others wait for it."""


def _save(job: int, rank: int, folder: Path, in_background: bool) -> None:
    part = torch.full((_ROWS, 8), float(job))
    state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", part, (0, rank, _NUM_RANKS)), "job": job}
    if not in_background:
        dist_checkpointing.save(state, folder / "one")
        return
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save(state, folder / "one", async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def _be_a_rank(job: int, rank: int, folder: Path, in_background: bool, delay_s: float) -> None:
    store = dist.FileStore(str(folder / f"rendezvous-{job}"), _NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NUM_RANKS, timeout=_GROUP_TIMEOUT)
    (folder / f"ready-{job}-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < 2 * _NUM_RANKS:
        time.sleep(0.001)
    time.sleep(delay_s)
    try:
        _save(job, rank, folder, in_background)
        (folder / f"saved-{job}-{rank}").touch()
    except StorageError as raised:
        (folder / f"refused-{job}-{rank}").write_text(str(raised))


def _fork(act: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_two_jobs(folder: Path, in_background: bool, delays_s: tuple[float, float]) -> None:
    (folder / "one").mkdir(parents=True)
    ranks = [
        _fork(lambda job=job, rank=rank: _be_a_rank(job, rank, folder, in_background, delays_s[job]))  # type: ignore[misc]
        for job in (0, 1)
        for rank in range(_NUM_RANKS)
    ]
    assert [_end(rank) for rank in ranks] == [0] * len(ranks)


def _look(folder: Path) -> None:
    """Each job was told one thing on all of its ranks, at most one that it has saved, and its values are there."""
    saved = sorted(path.name for path in folder.glob("saved-*"))
    told = {path.name: path.read_text() for path in folder.glob("refused-*")}
    jobs = {name.split("-")[1] for name in saved}
    assert len(saved) == len(jobs) * _NUM_RANKS and len(saved) + len(told) == 2 * _NUM_RANKS, (saved, told)
    assert len(jobs) == 1, f"expected one job to have saved, found {saved} and {told}"
    assert all("another save" in text or "already holds" in text for text in told.values()), told
    directory = folder / "one"
    assert why_incomplete(directory) == ""
    list(verify(directory))
    loaded = remesh.load({"w": torch.empty(_NUM_RANKS * _ROWS, 8)}, directory)
    (job,) = map(int, jobs)
    assert loaded["job"] == job and loaded["w"].eq(job).all(), "values of both jobs are in one checkpoint"


def main(folder: Path, seed: int, num_trials: int) -> None:
    torch.set_num_threads(1)  # no threads of torch's own before a fork
    rng = random.Random(seed)
    for trial in range(num_trials):
        place = folder / str(trial)
        _run_two_jobs(place, trial % 2 == 1, (0.0, rng.uniform(0, _LATEST_S)))
        _look(place)
    print(f"{num_trials} trials: one job's checkpoint each, the other job was told")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
