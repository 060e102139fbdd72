"""Requests: operations that are under way.

A request is one or several operations of the lower half (a neighbourhood collective is many) and what is to be done in
this process when all are over: unpacking, folding, unpickling. Persistent requests live here only: starting one starts
ordinary operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.calls.table import BY_NAME, CallFlag, WaitFor
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.exceptions import failure, numbered_failure, run_callback
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.link import MAX_WAIT, Completion, Landing, link, wait_shortly
from remesh.mpi.upper.status import Status

_CANCEL, _FREE = BY_NAME["cancel"], BY_NAME["free"]
_POLL_S = 0.001


class Operation:
    """One operation of the lower half."""

    __slots__ = ("completion", "keep", "landing", "number")

    def __init__(self, started: int | Completion, landing: Landing | None = None, keep: Any = None) -> None:
        self.landing, self.keep = landing, keep
        self.number = started if isinstance(started, int) else 0
        self.completion = started if isinstance(started, Completion) else None
        if self.number == 0 and self.completion is None:
            self.completion = Completion(k.ANY_SOURCE, k.ANY_TAG, 0, 0)


class Work:
    """Content of a Request."""

    finish: Callable[[], Any] | None = None  # run once, when all operations are over; gives the object received
    source: int | None = None  # for the status, where there was no message
    result: Any = None
    finished = False
    restart: Callable[[], Work] | None = None  # of a persistent request
    active = True  # a persistent request may be inactive
    started: Work | None = None  # of a persistent request

    def __init__(
        self,
        operations: list[Operation],
        *,
        ranks: dict[int, int] | None = None,
        finish: Callable[[], Any] | None = None,
        source: int | None = None,
    ) -> None:
        self.operations = operations
        self.ranks = ranks  # world rank -> rank in the communicator, for the status of a receive
        if finish is not None:
            self.finish = finish
        if source is not None:
            self.source = source

    @property
    def current(self) -> Work:
        """What is really under way: itself, or what a persistent request has started."""
        return self.started if self.started is not None else self

    def pending(self) -> list[Operation]:
        """Operations that are not known to be over."""
        return [one for one in self.operations if one.completion is None]

    @property
    def is_over(self) -> bool:
        """Whether nothing is pending; asks nobody."""
        for one in self.operations:  # noqa: SIM110 - the loop takes a third of the time of all()
            if one.completion is None:
                return False
        return True

    def wait_elsewhere(self, timeout_s: float) -> None:
        """Wait for what is not an operation of the lower half."""

    def conclude(self) -> int:
        """Run ``finish`` once; the error class."""
        if not self.finished:
            self.finished = True
            if self.finish is not None:
                self.result = self.finish()
        for one in self.operations:
            if one.completion is not None and one.completion.error:
                return one.completion.error
        return 0

    def fill(self, status: Status | None) -> None:
        """Tell the status how it ended."""
        if status is None:
            return
        only = self.operations[0].completion if len(self.operations) == 1 else None
        if only is None or self.ranks is None:
            status._fill(Completion(0, k.ANY_TAG, 0, 0), k.ANY_SOURCE if self.source is None else self.source)
        elif only.cancelled:
            status._fill(only, k.ANY_SOURCE)
        else:
            status._fill(only, self.ranks.get(only.source, k.ANY_SOURCE))


def progress(works: Sequence[Work], *, blocking: bool, every: bool) -> None:
    """Ask the lower half until all (or any) of these are over; once only if not blocking."""
    if blocking and every and _wait_at_once(works):
        return
    while True:
        waiting = [work for work in works if not work.is_over]
        if not waiting or (not every and len(waiting) < len(works)):
            return
        pending = [one for work in waiting for one in work.pending()]
        elsewhere = next((work for work in waiting if not work.pending()), None)
        if pending:
            chunk = pending[:MAX_WAIT]
            # With something to look after elsewhere, or more than one call can ask for, nobody may sleep there.
            sleep = blocking and elsewhere is None and (every or len(pending) <= MAX_WAIT)
            mode = WaitFor.ALL if sleep and every else WaitFor.SOME
            asked = [(one.number, one.landing) for one in chunk]
            for index, completion in link().wait(CallFlag.BLOCKING if sleep else 0, mode, asked):
                chunk[index].completion = completion
                chunk[index].keep = None
            if len(pending) > MAX_WAIT and not sleep:
                _ask_for_rest(pending[MAX_WAIT:])
        if not blocking:
            return
        if elsewhere is not None:
            elsewhere.wait_elsewhere(_POLL_S)


def _wait_at_once(works: Sequence[Work]) -> bool:
    """Wait for all in one call; False where it takes more."""
    pending: list[Operation] = []
    for work in works:
        before = len(pending)
        pending += [one for one in work.operations if one.completion is None]
        if len(pending) == before and not work.is_over:
            return False
    if pending and not (len(pending) <= MAX_WAIT and wait_shortly(pending)):
        return False
    for one in pending:
        one.keep = None
    return True


def _ask_for_rest(pending: list[Operation]) -> None:
    for start in range(0, len(pending), MAX_WAIT):
        chunk = pending[start : start + MAX_WAIT]
        for index, completion in link().wait(0, WaitFor.SOME, [(one.number, one.landing) for one in chunk]):
            chunk[index].completion = completion


class Request(Handle):
    """An operation under way."""

    __slots__ = ()

    @classmethod
    def _class_for(cls, content: Work) -> Any:
        return Grequest if isinstance(content, _Task) else Request if content.restart is None else Prequest

    def _is_idle(self) -> bool:
        """Null, or persistent and not started."""
        return self._h is None or not self._h.active

    def _retire(self, status: Status | None) -> int:
        """Its operation is over: tell the status, and become null or inactive; the error class."""
        work: Work = self._h
        if work is None or not work.active:
            raise failure("ERR_REQUEST", "ending a request that stands in the list twice; name each only once")
        current = work.current
        error = current.conclude()
        if status is not None:
            current.fill(status)
            status._error = error
        if current is not work:
            work.result = current.result
        if work.restart is None:
            self._h = None
        else:
            work.active, work.started = False, None
        return error

    # One request.

    def Wait(self, status: Status | None = None) -> bool:
        if self._is_idle():
            _empty(status)
            return True
        current = self._h.current
        if not current.is_over:
            progress([current], blocking=True, every=True)
        _check(self._retire(status))
        return True

    def Test(self, status: Status | None = None) -> bool:
        if self._is_idle():
            _empty(status)
            return True
        current = self._h.current
        if not current.is_over:
            progress([current], blocking=False, every=True)
        if not current.is_over:
            return False
        _check(self._retire(status))
        return True

    def Get_status(self, status: Status | None = None) -> bool:
        if self._is_idle():
            _empty(status)
            return True
        progress([self._h.current], blocking=False, every=True)
        over: bool = self._h.current.is_over
        if over:
            self._h.current.fill(status)
        return over

    def Cancel(self) -> None:
        if self._is_idle():
            raise failure("ERR_REQUEST", "cancelling a request that is null or inactive")
        for one in self._h.current.pending():
            link().ask(_CANCEL, (one.number,))

    def Free(self) -> None:
        if self._h is None:
            raise failure("ERR_REQUEST", "freeing a null request")
        if self._h.active:
            for one in self._h.current.pending():
                _kept_for_ever.append((one.keep, one.landing))
                link().ask(_FREE, (one.number,))
        self._h = None

    # Many requests.

    @classmethod
    def _active(cls, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        return [(index, request) for index, request in enumerate(requests) if not request._is_idle()]

    @classmethod
    def _find_any(
        cls, requests: Sequence[Request], status: Status | None, *, blocking: bool
    ) -> tuple[int, Request | None, Any]:
        active = cls._active(requests)
        if not active:
            _empty(status)
            return k.UNDEFINED, None, None
        progress([request._h.current for _, request in active], blocking=blocking, every=False)
        for index, request in active:
            if request._h.current.is_over:
                work = request._h
                _check(request._retire(status))
                return index, request, work.result
        return k.UNDEFINED, active[0][1], None

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        return cls._find_any(requests, status, blocking=True)[0]

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        index, request, _ = cls._find_any(requests, status, blocking=False)
        return index, index != k.UNDEFINED or request is None

    @classmethod
    def _all(cls, requests: Sequence[Request], statuses: list[Status] | None, *, blocking: bool) -> list[Any] | None:
        active = cls._active(requests)
        works = [request._h.current for _, request in active]
        progress(works, blocking=blocking, every=True)
        if not all(work.is_over for work in works):
            return None
        results: list[Any] = [None] * len(requests)
        places: list[Status | None] = [None] * len(requests)
        if statuses is not None:
            _lengthen(statuses, len(requests))
            places[: len(statuses)] = statuses[: len(requests)]
            for index, request in enumerate(requests):
                if request._is_idle():
                    _empty(places[index])
        failed = False
        for index, request in active:
            work = request._h
            failed |= bool(request._retire(places[index]))
            results[index] = work.result
        if failed:
            raise numbered_failure(CLASSES["ERR_IN_STATUS"], "see the error of each status")
        return results

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        cls._all(requests, statuses, blocking=True)
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        return cls._all(requests, statuses, blocking=False) is not None

    @classmethod
    def _some(
        cls, requests: Sequence[Request], statuses: list[Status] | None, *, blocking: bool
    ) -> tuple[list[int] | None, list[Any] | None]:
        active = cls._active(requests)
        if not active:
            return None, None
        progress([request._h.current for _, request in active], blocking=blocking, every=False)
        over = [(index, request) for index, request in active if request._h.current.is_over]
        indices, results = [], []
        for position, (index, request) in enumerate(over):
            status = None
            if statuses is not None:
                _lengthen(statuses, position + 1)
                status = statuses[position]
            work = request._h
            _check(request._retire(status))
            indices.append(index)
            results.append(work.result)
        return indices, results

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        return cls._some(requests, statuses, blocking=True)[0]

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        return cls._some(requests, statuses, blocking=False)[0]

    @classmethod
    def _look(cls, requests: Sequence[Request], *, every: bool) -> list[tuple[int, Request]]:
        active = cls._active(requests)
        progress([request._h.current for _, request in active], blocking=False, every=every)
        return [(index, request) for index, request in active if request._h.current.is_over]

    @classmethod
    def Get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        over = cls._look(requests, every=False)
        if over:
            over[0][1]._h.current.fill(status)
            return over[0][0], True
        if not cls._active(requests):
            _empty(status)
            return k.UNDEFINED, True
        return k.UNDEFINED, False

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        over = cls._look(requests, every=True)
        if len(over) != len(cls._active(requests)):
            return False
        if statuses is not None:
            _lengthen(statuses, len(requests))
            for request, status in zip(requests, statuses, strict=False):
                if request._is_idle():
                    _empty(status)
                else:
                    request._h.current.fill(status)
        return True

    @classmethod
    def Get_status_some(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        if not cls._active(requests):
            return None
        over = cls._look(requests, every=False)
        if statuses is not None:
            _lengthen(statuses, len(over))
            for position, (_, request) in enumerate(over):
                request._h.current.fill(statuses[position])
        return [index for index, _ in over]

    # With objects.

    def wait(self, status: Status | None = None) -> Any:
        work = self._h
        self.Wait(status)
        return None if work is None else work.result

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        work = self._h
        over = self.Test(status)
        return over, work.result if over and work is not None else None

    def cancel(self) -> None:
        self.Cancel()

    def get_status(self, status: Status | None = None) -> bool:
        return self.Get_status(status)

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        index, _, result = cls._find_any(requests, status, blocking=True)
        return index, result

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        index, request, result = cls._find_any(requests, status, blocking=False)
        return index, index != k.UNDEFINED or request is None, result

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        return cls._all(requests, statuses, blocking=True) or []

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> tuple[bool, Any]:
        results = cls._all(requests, statuses, blocking=False)
        return results is not None, results

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        return cls._some(requests, statuses, blocking=True)

    @classmethod
    def testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        return cls._some(requests, statuses, blocking=False)

    get_status_any = Get_status_any
    get_status_all = Get_status_all
    get_status_some = Get_status_some


_kept_for_ever: list[Any] = []
"""Buffers of requests that were freed under way: the lower half may still read or write them."""


def _lengthen(statuses: list[Status], num: int) -> None:
    if len(statuses) < num and isinstance(statuses, list):
        statuses.extend(Status() for _ in range(num - len(statuses)))


def _empty(status: Status | None) -> None:
    if status is not None:
        status._fill(Completion(0, k.ANY_TAG, 0, 0), k.ANY_SOURCE)


def _check(error: int) -> None:
    if error:
        raise numbered_failure(error, "in an operation that has just completed")


class Prequest(Request):
    """A persistent request: started as often as wanted."""

    __slots__ = ()

    @classmethod
    def _expect(cls, content: Work) -> None:
        if content.restart is None:
            raise TypeError("expecting a persistent request")

    @classmethod
    def _of(cls, restart: Callable[[], Work]) -> Self:
        work = Work([])
        work.restart, work.active = restart, False
        return cls._wrap(work)

    def Start(self) -> None:
        if self._h is None or self._h.active:
            raise failure("ERR_REQUEST", "starting a request that is null or has been started")
        self._h.started, self._h.active = self._h.restart(), True

    @classmethod
    def Startall(cls, requests: list[Prequest]) -> None:
        for request in requests:
            request.Start()

    def _partitions(self) -> Any:
        started = None if self._h is None else self._h.started
        if not hasattr(started, "ready"):
            raise failure("ERR_REQUEST", "the request is not a partitioned send that has been started")
        return started

    def Pready(self, partition: int) -> None:
        self._partitions().ready([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        self._partitions().ready(range(partition_low, partition_high + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        self._partitions().ready(partitions)

    def Parrived(self, partition: int) -> bool:
        if self._is_idle():
            return True
        progress([self._h.current], blocking=False, every=True)
        over: bool = self._h.current.is_over
        return over


_GENERALIZED = "a generalized request"


class _Task(Work):
    """Work that the program itself completes."""

    def __init__(self) -> None:
        super().__init__([])
        self.done = threading.Event()
        self.query: Callable[[Status], None] = lambda status: None
        self.free: Callable[[], None] = lambda: None
        self.cancel: Callable[[bool], None] = lambda completed: None

    @property
    def is_over(self) -> bool:
        return self.done.is_set()

    def wait_elsewhere(self, timeout_s: float) -> None:
        self.done.wait(timeout_s)

    def fill(self, status: Status | None) -> None:
        told = Status() if status is None else status
        _empty(told)
        run_callback(_GENERALIZED, self.query, told)

    def conclude(self) -> int:
        return 0


class Grequest(Request):
    """A generalized request: the program says when it is complete."""

    __slots__ = ()

    @classmethod
    def _expect(cls, content: Work) -> None:
        if not isinstance(content, _Task):
            raise TypeError("expecting a generalized request")

    @classmethod
    def Start(
        cls,
        query_fn: Callable[..., None] | None = None,
        free_fn: Callable[..., None] | None = None,
        cancel_fn: Callable[..., None] | None = None,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Grequest:
        task, more, named = _Task(), args or (), kwargs or {}
        if query_fn is not None:
            task.query = lambda status: query_fn(status, *more, **named)
        if free_fn is not None:
            task.free = lambda: free_fn(*more, **named)
        if cancel_fn is not None:
            task.cancel = lambda completed: cancel_fn(completed, *more, **named)
        return cls._wrap(task)

    def Complete(self) -> None:
        if self._h is None:
            raise failure("ERR_REQUEST", "completing a null request")
        self._h.done.set()

    def complete(self, obj: Any = None) -> None:
        if self._h is not None:
            self._h.result = obj
        self.Complete()

    def Cancel(self) -> None:
        if self._h is None:
            raise failure("ERR_REQUEST", "cancelling a null request")
        run_callback(_GENERALIZED, self._h.cancel, self._h.done.is_set())

    cancel = Cancel

    def _retire(self, status: Status | None) -> int:
        task = self._h
        self._h = None
        try:
            task.fill(status)
        finally:
            run_callback(_GENERALIZED, task.free)
        return 0

    def Free(self) -> None:
        if self._h is not None:
            task, self._h = self._h, None
            run_callback(_GENERALIZED, task.free)


REQUEST_NULL = Request()
