"""Where do the ranks of a test come from? A pool of worker processes, started once and used by many tests.

Starting torch costs seconds, so one server process imports it and every worker is forked from there in
milliseconds. A run lends a fresh gloo group to the first ``world_size`` workers:

    pool            worker 0 .. n-1
    run(fn) ──────> join group ─> fn(*args) ─> leave group
            <────── result, or traceback

A run that fails in any way ends the workers it used, so nothing of a broken group reaches the next test. A
worker that does not answer in time is asked for the stacks of its threads before it is killed. The process
that owns the pool needs no torch.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from remesh.errors import ConfigError
from remesh.testing.rank_messages import Answer, Call, FunctionName
from remesh.testing.rank_process import StoreHost, Worker, fork_server

_GRACE_S = 5.0
"""How long the other ranks may go on once one has failed; a broken group wakes most of them at once."""
_GROUP_MARGIN_S = 30.0
"""The group waits longer than the run: a hang is to be found by its stacks, not by gloo's timeout."""
_MAX_OUTPUT_CHARS = 12_000
_LIBRARY_CHATTER = "[Gloo] Rank "


class _Died:
    def __repr__(self) -> str:
        return "DIED"


DIED: Final = _Died()
"""Stands for the result of a rank that was expected to die."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """How one rank of a run ended."""

    rank: int
    end: str
    """``"returned"``, ``"raised"``, ``"stuck"``, ``"died by SIGKILL"``, ``"left with exit code 3"``."""
    ended_s: float
    """When, on the monotonic clock; infinite for a rank that was stuck."""
    text: str
    """Traceback or stacks, and what the rank printed."""
    answer: Answer | None = None


class RanksFailed(Exception):
    """A run did not return on every rank; ``reports`` tells of each, in order of rank."""

    def __init__(self, what: str, reports: Sequence[RankReport]) -> None:
        self.reports = tuple(reports)
        # Whoever failed first comes first: the others usually failed because of it.
        failed = sorted((r for r in reports if r.end != "returned"), key=lambda r: (r.ended_s, r.rank))
        ends = ", ".join(f"rank {report.rank} {report.end}" for report in failed)
        sections = [f"--- rank {report.rank} {report.end} ---\n{report.text}" for report in failed]
        super().__init__("\n".join([f"running {what} on {len(reports)} ranks: {ends}", *sections]))


class RankPool:
    """Worker processes that lend themselves as ranks; a context manager.

    ``start`` costs the import of torch once; ``close`` ends every process of the pool.
    """

    def __init__(self, max_world_size: int = 8) -> None:
        self.max_world_size = max_world_size
        self._context = fork_server()
        self._workers: list[Worker] = []
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
        # Read by the numeric libraries when the server imports them: forking wants no threads before it.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._folder = Path(tempfile.mkdtemp(prefix="remesh-ranks-"))
        self._store = StoreHost(self._context)

    def close(self) -> None:
        """End every process of the pool; it may be started again."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        if self._store is not None:
            self._store.end()
            self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int = 4,
        args: Sequence[Any] = (),
        *,
        timeout_s: float = 60.0,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Call ``fn(*args)`` on every rank of a fresh gloo group; the results, in order of rank.

        ``fn`` stands at the top of a module; arguments and results are pickled. Ranks in ``dying`` are
        expected to end their own process: their result is :data:`DIED`. Raises :class:`RanksFailed` when a
        rank raises, dies or has not returned after ``timeout_s``, or when a rank in ``dying`` lives on.
        """
        name = FunctionName.of(fn)
        if not 1 <= world_size <= self.max_world_size:
            raise ConfigError(
                f"running {name} on a pool of ranks: found world_size {world_size}, expected 1 to "
                f"{self.max_world_size}; make the pool with a larger max_world_size"
            )
        payload = pickle.dumps(tuple(args))
        workers = self._ready_workers(world_size)
        reports: list[RankReport] = []
        try:
            self._post(name, payload, workers, timeout_s)
            reports = _collect(workers, timeout_s, frozenset(dying))
        except BaseException as error:
            # The wait was interrupted, most likely by the test's own timeout: say where the ranks are.
            for rank, worker in enumerate(workers):
                error.add_note(f"--- rank {rank} ---\n{_tail(worker.dump_stacks())}")
            raise
        finally:
            if not reports or any(report.end != "returned" for report in reports):
                self._drop(workers)
        return _results(str(name), reports, frozenset(dying))

    def _ready_workers(self, num_workers: int) -> list[Worker]:
        """The first workers of the pool, all alive; new ones are forked in place of those that are not."""
        self.start()
        assert self._folder is not None
        self._drop([worker for worker in self._workers if not worker.is_alive])
        while len(self._workers) < num_workers:
            self._workers.append(Worker(self._context, self._folder / f"worker-{self._num_workers_started}.log"))
            self._num_workers_started += 1
        return self._workers[:num_workers]

    def _post(self, name: FunctionName, args: bytes, workers: Sequence[Worker], timeout_s: float) -> None:
        assert self._store is not None
        for rank, worker in enumerate(workers):
            call = Call(
                function=name,
                args=args,
                rank=rank,
                world_size=len(workers),
                store_port=self._store.port,
                store_prefix=f"run-{self._num_runs}",
                group_timeout_s=timeout_s + _GROUP_MARGIN_S,
                sys_path=tuple(sys.path),
            )
            worker.post(call)
        self._num_runs += 1

    def _drop(self, workers: Sequence[Worker]) -> None:
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            worker.kill()


def _collect(workers: Sequence[Worker], timeout_s: float, dying: frozenset[int]) -> list[RankReport]:
    """Wait until every rank has ended, or the time is up; one report per rank, in order."""
    deadline_s = time.monotonic() + timeout_s
    reports: dict[int, RankReport] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left_s):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            report = _report_end(rank, workers[rank])
            reports[rank] = report
            if report.end != "returned" and rank not in dying:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    for rank in waiting.values():
        reports[rank] = RankReport(rank, "stuck", float("inf"), _tail(workers[rank].dump_stacks()))
    return [reports[rank] for rank in range(len(workers))]


def _report_end(rank: int, worker: Worker) -> RankReport:
    answer = worker.take_answer()
    output = _tail(worker.new_output())
    if answer is None:
        return RankReport(rank, worker.describe_end(), time.monotonic(), output)
    if answer.result is None:
        return RankReport(rank, "raised", answer.ended_s, "\n".join(filter(None, [answer.traceback, output])), answer)
    return RankReport(rank, "returned", answer.ended_s, output, answer)


def _results(what: str, reports: Sequence[RankReport], dying: frozenset[int]) -> list[Any]:
    """The results; what the ranks printed is printed here, where pytest shows it beside a failure."""
    results = []
    for report in reports:
        died = report.answer is None and report.end != "stuck"
        if died != (report.rank in dying) or report.end in ("raised", "stuck"):
            raise RanksFailed(what, reports)
        results.append(DIED if died or report.answer is None else pickle.loads(report.answer.result or b""))
    for report in reports:
        for line in report.text.splitlines():
            sys.stdout.write(f"[rank {report.rank}] {line}\n")
    return results


def _tail(output: str) -> str:
    """The end of what a rank wrote, without what gloo says in every run."""
    kept = "\n".join(line for line in output.splitlines() if not line.startswith(_LIBRARY_CHATTER))
    return kept if len(kept) <= _MAX_OUTPUT_CHARS else "... " + kept[-_MAX_OUTPUT_CHARS:]
