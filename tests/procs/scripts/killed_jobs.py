"""Jobs of four ranks that are killed while they save: ``killed_jobs.py FOLDER NUM_TRIALS SEED [WAY]`` prints the end.

A trial is a job that saves step after step. At a random instant one rank is killed from outside, or all are, as when
the power fails. Then a process that knows nothing of the job looks at what is on disk: a complete checkpoint must be
there, not older than the newest that any rank was told of, and whatever is taken for one must load bit-equal.

Saves in the background are settled by a thread between two calls of the loop, and the loop changes its state as soon as
a save has begun. What a killed rank started for them, to copy or to write, must end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.plan.step_names import step_name, step_of
from remesh.checkpoint.run.housekeeping import remove_checkpoint
from remesh.dist_checkpointing import ShardedObject, ShardedTensor, check_is_distributed_checkpoint
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from remesh.foundation.errors import Error

NUM_RANKS = 4
IN_FRONT = ("sync", "fully parallel", "older ones removed")
HOW = (*IN_FRONT, "async")
NUM_ELEMENTS = 64 << 10
"""Of each rank's part."""
_LATEST_S = 1.5
_GROUP_TIMEOUT_S = 40
"""After so long gloo gives up on a rank that was killed while groups were made, well before whoever runs this does."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def state(step: int, rank: int, part: torch.Tensor) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", part.fill_(step * NUM_RANKS + rank), (0, rank, NUM_RANKS)),
        "both": ShardedTensor.from_rank_offsets("both", torch.full((500,), step), replica_id=rank),
        "rng": ShardedObject("rng", {"step": step}, (NUM_RANKS,), (rank,)),
        "step": step,
    }


def save_until_killed(root: Path, how: str, rank: int) -> None:
    """Save step after step, and note each step that this rank was told is complete. Ends when a peer is gone."""
    store = dist.FileStore(str(root / "rendezvous"), NUM_RANKS)
    wait = timedelta(seconds=_GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=wait)
    (root / f"ready-{rank}").touch()
    base = TorchDistSaveShardedStrategy()
    strategy: Any = FullyParallelSaveStrategyWrapper(base) if how == "fully parallel" else base
    queue, part = AsyncCallsQueue(), torch.empty(NUM_ELEMENTS)
    for step in range(1000):
        directory = root / step_name(step)
        if rank == 0:
            directory.mkdir()
        dist.barrier()
        done = step
        if how == "async":
            request = dist_checkpointing.save(state(step, rank, part), directory, strategy, async_sharded_save=True)
            assert request is not None
            queue.schedule_async_request(request)
            part.fill_(-1)
            queue.maybe_finalize_async_calls()
            done = step - queue.get_num_unfinalized_calls()
        else:
            dist_checkpointing.save(state(step, rank, part), directory, strategy)
        if done >= 0:
            (root / f"told-{rank}-{done}").touch()
        if rank == 0 and how == "older ones removed" and step >= 2:
            remove_checkpoint(root / step_name(step - 2))


def look(root: Path) -> None:
    """Raise unless all is well with what is on disk."""
    told = max((int(path.name.rpartition("-")[2]) for path in root.glob("told-*")), default=-1)
    newest = remesh.latest_complete(root)
    found = -1 if newest is None else step_of(newest.name)
    assert found is not None and found >= told, f"step {told} was told complete, the newest on disk is {found}"
    for directory in sorted(root.glob("step-*")):
        if check_is_distributed_checkpoint(directory):
            step = step_of(directory.name)
            assert step is not None
            loaded = dist_checkpointing.load_plain_tensors(directory)
            assert torch.equal(loaded["w"], torch.arange(4.0).repeat_interleave(NUM_ELEMENTS) + step * NUM_RANKS)
            assert loaded["both"].eq(step).all()
            assert dist_checkpointing.load_common_state_dict(directory)["step"] == step
    (root / "newest").write_text(str(found))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def fork(act: Callable[[], None], may_fail: bool) -> int:
    """Run ``act`` in a process of its own; its id."""
    child = os.fork()
    if child:
        return child
    die_with_parent()
    status = 0
    try:
        act()
    except BaseException as raised:
        gone = isinstance(raised, Error | RuntimeError)
        if not (may_fail and gone):
            traceback.print_exc()
            status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end(child: int) -> int:
    """Wait for a process; its exit status, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(what: Callable[[], bool]) -> None:
    """Return when it is so, or when a child has ended: who waits for its end tells how."""
    while not what() and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)


def reap_orphans() -> None:
    """See that what the ranks have started ends without them."""
    with contextlib.suppress(ChildProcessError):  # nobody is left
        while True:
            os.waitpid(-1, 0)


def run_trial(root: Path, how: str, dying: list[int], delay_s: float, since: str) -> int:
    """The newest step that is left, -1 for none. Ranks die so long after four files are named like ``since``."""
    root.mkdir()
    ranks = [fork(lambda rank=rank: save_until_killed(root, how, rank), may_fail=True) for rank in range(NUM_RANKS)]  # type: ignore[misc]
    wait_for(lambda: sum(1 for _ in root.glob(since)) >= NUM_RANKS)
    time.sleep(delay_s)
    for rank in dying:
        os.kill(ranks[rank], signal.SIGKILL)
    statuses = [end(rank) for rank in ranks]
    assert all(status == 0 or rank in dying for rank, status in enumerate(statuses)), (how, dying, statuses)
    status = end(fork(lambda: look(root), may_fail=False))
    assert status == 0, f"{how}, ranks {dying} killed after {delay_s:.3f} s: see above; the files are in {root}"
    reap_orphans()
    newest = int((root / "newest").read_text())
    shutil.rmtree(root)
    return newest


def main(folder: Path, num_trials: int, seed: int, ways: Sequence[str] = HOW) -> None:
    die_with_parent()
    torch.set_num_threads(1)  # no threads of torch's own before a fork
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warm = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3000)), "rng": ShardedObject("rng", {}, (1,), (0,))}
    (folder / "warm").mkdir()
    dist_checkpointing.save(warm, folder / "warm")  # what a first save loads, all ranks then have from the start
    rng = random.Random(seed)
    newest = []
    for trial in range(num_trials):
        lap, way = divmod(trial, len(ways))
        dying = list(range(NUM_RANKS)) if (lap + way) % 3 == 2 else [rng.randrange(NUM_RANKS)]
        since = "told-*" if lap % 2 else "ready-*"  # some die before there is a checkpoint, not most
        newest.append(run_trial(folder / str(trial), ways[way], dying, rng.uniform(0.0, _LATEST_S), since))
    some = sum(step >= 0 for step in newest)
    told = ", ".join(
        f"{count} {how}" for how, count in Counter(ways[at % len(ways)] for at in range(num_trials)).items()
    )
    with contextlib.suppress(BrokenPipeError):
        print(f"{num_trials} kills: {some} left a newest checkpoint, {num_trials - some} came before the first one")
        print(f"ways: {told}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or HOW)
