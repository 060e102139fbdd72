"""Run of a function on the ranks of a pool, from the calls to the last answer.

    post ──> all ranks join their group ──> fn(*args) on each ──> answers
             (limit: since the last        (limit: timeout_s)
              progress of any)

A rank that does not answer in time is asked for the stacks of its threads. Once one has failed, the others have a few
seconds: they usually fail because of it.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Final, Self

from remesh.foundation.errors import Error
from remesh.testbed.rank_process import START_POLL_S, RankWorker, start_limit

_GRACE_S = 5.0
"""How long the other ranks may go on once one has failed; a broken group wakes most of them at once."""
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
    host: str
    """Empty where all ranks are on one host."""
    end: str
    """``"returned"``, ``"raised"``, ``"stuck"``, ``"died by SIGKILL"``, ``"left with exit code 3"``."""
    ended_s: float
    """When, on the monotonic clock; infinite for a rank that was stuck."""
    text: str
    """Traceback or stacks, and what the rank printed."""
    result: bytes | None = None
    """Pickled."""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.host and f' on {self.host}'} {self.end}"


class RanksFailed(Error, RuntimeError):
    """A run did not return on every rank; ``reports`` has one of each, in order of rank."""

    def __init__(self, what: str, reports: Sequence[RankReport]) -> None:
        self.reports = tuple(reports)
        # The rank that failed first comes first: the others usually failed because of it.
        failed = sorted((r for r in reports if r.end != "returned"), key=lambda r: (r.ended_s, r.rank))
        sections = [f"--- {report} ---\n{report.text}" for report in failed]
        ends = ", ".join(map(str, failed)) or "all returned, though some were to die"
        super().__init__("\n".join([f"running {what} on {len(reports)} ranks: {ends}", *sections]))


class RankRun:
    """Ranks at work; a context manager that ends them."""

    def __init__(
        self, what: str, workers: Sequence[RankWorker], timeout_s: float, drop: Callable[[Sequence[RankWorker]], None]
    ) -> None:
        """``drop`` ends workers, and the pool forgets them."""
        self._what = what
        self.workers = tuple(workers)
        self._timeout_s = timeout_s
        self._drop = drop
        self._killed: set[int] = set()
        self.reports: tuple[RankReport, ...] = ()
        """Of all ranks in order, once they were waited for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def kill(self, rank: int) -> None:
        """SIGKILL a rank; its result will be None."""
        self._killed.add(rank)
        self.workers[rank].kill()

    def end(self) -> None:
        """Kill the ranks that still run, and their processes."""
        self._drop(self.workers)

    def wait(self, dying: Collection[int] = ()) -> list[Any]:
        """The results in order of rank: None for those that were killed, `DIED` for those in ``dying``.

        Raises `RanksFailed` when a rank raises, dies unasked, has not returned in time, or lives though it was to die.
        """
        try:
            self.reports = tuple(self._collect(self._killed.union(dying)))
        except BaseException as error:
            # The wait was interrupted, most likely by a test's own timeout: report where the ranks are.
            for rank, worker in enumerate(self.workers):
                error.add_note(f"--- rank {rank} ---\n{_tail(worker.dump_stacks())}")
            raise
        results = []
        for report in self.reports:
            gone = report.rank in self._killed or report.rank in dying
            if report.end in ("raised", "stuck") or (report.result is None) != gone:
                raise RanksFailed(self._what, self.reports)
            lost = None if report.rank in self._killed else DIED
            results.append(lost if report.result is None else pickle.loads(report.result))
        return results

    def print_outputs(self) -> None:
        """Print what the ranks printed, where pytest shows it beside a failure."""
        for report in self.reports:
            for line in report.text.splitlines():
                sys.stdout.write(f"[rank {report.rank}] {line}\n")

    def _collect(self, expected: set[int]) -> list[RankReport]:
        """Wait until every rank has ended, or the time is up; one report for each, in order."""
        reports: dict[int, RankReport] = {}
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self.workers)}
        coming = set(waiting.values())
        limit, deadline_s = start_limit(worker.pid for worker in self.workers), math.inf
        while waiting and time.monotonic() < deadline_s and not (coming and limit.is_over()):
            look_s = min(START_POLL_S if coming else math.inf, deadline_s - time.monotonic())
            for pipe in wait(list(waiting), max(look_s, 0.0)):
                rank = waiting[pipe]
                report = self._hear(rank)
                if coming:
                    coming.discard(rank)
                    deadline_s = deadline_s if coming else min(deadline_s, time.monotonic() + self._timeout_s)
                if report is not None:
                    del waiting[pipe]
                    reports[rank] = report
                    if report.end != "returned" and rank not in expected:
                        deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        for rank in waiting.values():
            reports[rank] = self._report(rank, "stuck", math.inf, _tail(self.workers[rank].dump_stacks()))
        return [reports[rank] for rank in range(len(self.workers))]

    def _hear(self, rank: int) -> RankReport | None:
        """What a rank has come to, or None for one that is in its group now and goes on."""
        worker = self.workers[rank]
        answer = worker.take_answer()
        if isinstance(answer, bytes):
            return None
        output = _tail(worker.new_output())
        if answer is None:
            return self._report(rank, worker.describe_end(), time.monotonic(), output)
        if answer.result is None:
            return self._report(rank, "raised", answer.ended_s, "\n".join(filter(None, [answer.traceback, output])))
        return self._report(rank, "returned", answer.ended_s, output, answer.result)

    def _report(self, rank: int, end: str, ended_s: float, text: str, result: bytes | None = None) -> RankReport:
        entry = self.workers[rank].entry
        return RankReport(rank, "" if entry is None else entry.host, end, ended_s, text, result)


def _tail(output: str) -> str:
    """The end of what a rank wrote, without what gloo prints in every run."""
    kept = "\n".join(line for line in output.splitlines() if not line.startswith(_LIBRARY_CHATTER))
    return kept if len(kept) <= _MAX_OUTPUT_CHARS else "... " + kept[-_MAX_OUTPUT_CHARS:]
