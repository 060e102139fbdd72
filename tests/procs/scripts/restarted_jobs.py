"""One job in many lives, each of which ends by a kill in its saves: ``restarted_jobs.py FOLDER NUM_LIVES SEED``.

In each life three or two ranks go on from the newest checkpoint, check every element of it, and save step after step in
the background, changing the state at once. One of them is killed, or all are. The newest checkpoint must never be older
than any step that a rank was told is complete, nor go back from life to life. The last life ends by itself; then there
are as many checkpoints as are to stay, and nothing that a killed save has left before them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parent))
from killed_jobs import die_with_parent, end, fork, wait_for

import remesh
from remesh.checkpoint.plan.step_names import step_name, step_of

KEEP = 2
NUM_AT_END = 3
SHAPE = (60, 500)
_TIMEOUT_S, _TIMEOUT_AT_END_S = 4, 600
"""While groups are made gloo waits five times as long for a rank that was killed, and whoever runs this waits 60 s. In
the last life nobody is killed."""
_LATEST_S = 0.6


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full(SHAPE, float(step))
    return {"cut": distribute_tensor(whole, mesh, [Shard(0)]), "whole": torch.full((100,), float(step)), "step": step}


def live(folder: Path, life: int, rank: int, num_ranks: int, num_steps: int) -> None:
    """Go on from the newest checkpoint for so many steps; note each that this rank was told is complete."""
    store = dist.FileStore(str(folder / f"rendezvous-{life}"), num_ranks)
    wait = timedelta(seconds=_TIMEOUT_AT_END_S if num_steps == NUM_AT_END else _TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=wait)
    checkpoints = remesh.Checkpoints(folder / "run", keep=KEEP, background=True)
    before = checkpoints.latest()
    if before is not None:
        wanted = state(-1)
        assert checkpoints.load(wanted)["step"] == before
        assert wanted["cut"].to_local().eq(before).all() and wanted["whole"].eq(before).all()
    (folder / f"ready-{life}-{rank}").touch()
    first = 0 if before is None else before + 1

    def note(saved: Future[Any]) -> None:
        if saved.exception() is None:
            (folder / f"told-{step_of(saved.result().name)}-{rank}").touch()

    for step in range(first, first + num_steps):
        changing = state(step)
        checkpoints.save(step, changing).add_done_callback(note)
        changing["cut"].to_local().fill_(-2)
        changing["whole"].fill_(-2)
    checkpoints.wait()


def newest_told(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("told-*")), default=-1)


def run_life(folder: Path, life: int, rng: random.Random, is_last: bool) -> None:
    """Start the ranks, kill some of them unless this life is the last, and see how they end."""
    num_ranks = rng.choice((2, 3))
    dying = [] if is_last else list(range(num_ranks)) if rng.random() < 0.3 else [rng.randrange(num_ranks)]
    num_steps = NUM_AT_END if is_last else 10_000
    ranks = [
        fork(lambda rank=rank: live(folder, life, rank, num_ranks, num_steps), may_fail=not is_last)  # type: ignore[misc]
        for rank in range(num_ranks)
    ]
    if not is_last:
        wait_for(lambda: sum(1 for _ in folder.glob(f"ready-{life}-*")) == num_ranks)
        time.sleep(rng.uniform(0.0, _LATEST_S))
        for rank in dying:
            os.kill(ranks[rank], signal.SIGKILL)
    statuses = [end(rank) for rank in ranks]
    assert all(status == 0 or rank in dying for rank, status in enumerate(statuses)), (life, dying, statuses)


def main(folder: Path, num_lives: int, seed: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)  # no threads of torch's own before a fork
    remesh.save({"w": torch.zeros(3)}, folder / "warm")  # what a first save loads, all ranks then have from the start
    rng = random.Random(seed)
    newest, num_moved = -1, 0
    for life in range(num_lives):
        run_life(folder, life, rng, is_last=life == num_lives - 1)
        found = remesh.latest_complete(folder / "run")
        step = -1 if found is None else step_of(found.name)
        assert step is not None and step >= max(newest, newest_told(folder)), (life, step, newest, newest_told(folder))
        num_moved, newest = num_moved + (step > newest), step
    left = sorted(path.name for path in (folder / "run").iterdir())
    assert left == [step_name(newest - 1), step_name(newest)], f"expected the newest {KEEP}, found {left}"
    print(f"{num_lives} lives, {newest + 1} steps, {num_moved} lives came further")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
