"""Pool of worker processes for tests: started once, and used as ranks by many runs.

Starting torch costs seconds, so one server process imports it and every worker is forked from there in
milliseconds. A run lends a fresh gloo group to ``world_size`` workers:

    pool            worker 0 .. n-1
    run(fn) ──────> join group ─> fn(*args) ─> leave group
            <────── result, or traceback

A run that fails in any way ends the workers it used, so nothing of a broken group reaches the next. With an *entry*
a worker enters a host of its own first (`remesh.testbed`). The process that owns the pool needs no torch.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remesh.foundation.errors import ConfigError
from remesh.testbed.rank_messages import FunctionName, RankCall, RankEntry
from remesh.testbed.rank_process import RankWorker, StoreHost, fork_server
from remesh.testbed.rank_run import DIED, RankRun, RanksFailed

__all__ = ["DIED", "RankPool", "RankRun", "RanksFailed"]

_GROUP_MARGIN_S = 600.0
"""The group waits longer than the run: a hang is to be found by its stacks, not by gloo's timeout."""


class RankPool:
    """Worker processes that lend themselves as ranks; a context manager.

    ``start`` costs the import of torch once; ``close`` ends every process of the pool.
    """

    def __init__(
        self, max_world_size: int = 8, *, store_address: str = "127.0.0.1", store_entry: RankEntry | None = None
    ) -> None:
        """The store of the groups listens at this address, inside its own host where there are any."""
        self.max_world_size = max_world_size
        self._store_at = (store_entry, store_address)
        self._workers: list[RankWorker] = []
        self._busy: set[RankWorker] = set()
        self._store: StoreHost | None = None
        self._folder: Path | None = None
        self._num_workers_started = 0
        self._num_runs = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start the server process and the store; workers follow when a run needs them."""
        if self._store is not None:
            return
        # The process of the store removes it, also when this one is killed.
        self._folder = Path(tempfile.mkdtemp(prefix="remesh-ranks-"))
        self._store = StoreHost(fork_server(), *self._store_at, self._folder)

    def close(self) -> None:
        """End every process of the pool; it may be started again."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._busy.clear()
        if self._store is not None:
            self._store.end()
            self._store = None

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int = 4,
        args: Sequence[Any] = (),
        *,
        timeout_s: float = 120.0,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Call ``fn(*args)`` on every rank of a fresh gloo group; the results, in order of rank.

        ``fn`` stands at the top of a module; arguments and results are pickled. Ranks in ``dying`` are
        expected to end their own process: their result is :data:`DIED`. Raises :class:`RanksFailed` when a
        rank raises, dies or has not returned ``timeout_s`` after all have met, or when a rank in ``dying`` lives on.
        """
        if not 1 <= world_size <= self.max_world_size:
            raise ConfigError(
                f"running {FunctionName.of(fn)} on a pool of ranks: found world_size {world_size}, expected 1 to "
                f"{self.max_world_size}; make the pool with a larger max_world_size"
            )
        run = self.begin(fn, [None] * world_size, args, timeout_s=timeout_s)
        try:
            results = run.wait(dying)
        finally:
            if any(report.end != "returned" for report in run.reports) or not run.reports:
                run.end()
            else:
                self._busy.difference_update(run.workers)
        run.print_outputs()
        return results

    def begin(
        self, fn: Callable[..., Any], entries: Sequence[RankEntry | None], args: Sequence[Any] = (), *, timeout_s: float
    ) -> RankRun:
        """Like `run`, with a rank inside each of the hosts, but return while they work. The run ends its workers."""
        name = FunctionName.of(fn)
        payload = pickle.dumps(tuple(args))
        self.start()
        assert self._store is not None
        workers = self._ready_workers(entries)
        for rank, worker in enumerate(workers):
            call = RankCall(
                function=name,
                args=payload,
                rank=rank,
                world_size=len(workers),
                store=self._store.place,
                store_prefix=f"run-{self._num_runs}",
                group_timeout_s=timeout_s + _GROUP_MARGIN_S,
                sys_path=tuple(sys.path),
            )
            worker.post(call)
        self._num_runs += 1
        return RankRun(str(name), workers, timeout_s, self._drop)

    def _ready_workers(self, entries: Sequence[RankEntry | None]) -> list[RankWorker]:
        """A worker inside each host, alive and with nothing to do; new ones are forked where there is none."""
        assert self._folder is not None
        self._drop([worker for worker in self._workers if worker not in self._busy and not worker.is_alive])
        found = []
        for entry in entries:
            worker = next((one for one in self._workers if one not in self._busy and one.entry == entry), None)
            if worker is None:
                log = self._folder / f"worker-{self._num_workers_started}.log"
                worker = RankWorker(fork_server(), entry, log)
                self._num_workers_started += 1
                self._workers.append(worker)
            self._busy.add(worker)
            found.append(worker)
        return found

    def _drop(self, workers: Sequence[RankWorker]) -> None:
        self._workers = [worker for worker in self._workers if worker not in workers]
        self._busy.difference_update(workers)
        for worker in workers:
            worker.kill()
            worker.end()
