"""Executors over one pool of threads, which is the process's.

`PooledExecutor` does tasks on the threads of the pool:

    submit           a thread that is idle takes the task, or a new one; nothing is made at import
    idle             a thread without tasks ends after `_IDLE_S`
    end of `main`    the process waits for all tasks, and for those that they submit, while executors of others still
                     take work; a thread that submits later does the task itself, and finds it done
    exit code        other than 0 where something is lost by then whose error nothing received (`fail_at_end`)
    fork             the child has none of these tasks: it waits for none, and their futures raise `ForkError` there
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # before `_wait_at_end` is registered, which therefore is called first
import contextlib
import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from remesh.foundation.collector import go_on_in_fork
from remesh.foundation.errors import ForkError
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.threads import make_thread

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger(__name__)

_IDLE_S = 1.0


class PooledExecutor(Executor):
    """Does at most ``limit`` tasks at once, begun in the order of their submission, on threads of the process's pool.

    There is nothing to close; leaving it as a context manager waits for its tasks. A task cannot be cancelled: the
    holder of its future can count on it.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._begin_anew()
        _executors.add(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let a thread call the function; its future."""
        future: Future[T] = Future()
        self.put(future, partial(fn, *args, **kwargs))
        return future

    def put(self, future: Future[T], act: Callable[[], T]) -> None:
        """Let a thread call ``act``; the future, a new one, gets its result or its error."""
        future.set_running_or_notify_cancel()
        with self._lock:
            self._tasks.append((future, act))
            self._pending.add(future)
            needs_thread = self._num_threads < self._limit
            self._num_threads += needs_thread
        if needs_thread:
            _pool.run(self._what, self._work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the tasks of now. It may be used again."""
        if wait:
            concurrent.futures.wait(self.pending())

    def pending(self) -> list[Future[Any]]:
        """The futures of tasks that are not done."""
        with self._lock:
            return list(self._pending)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            future, act = task
            try:
                end = partial(future.set_result, act())
            except BaseException as raised:  # raised again where the future is asked for its result
                end = partial(future.set_exception, raised)
            del task, act  # what they hold may be large, and is free when the future is done
            end()
            del end
            with self._lock:
                self._pending.discard(future)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._num_threads -= 1
            return None

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._pending: set[Future[Any]] = set()
        self._num_threads = 0

    def _leave_to_parent(self) -> None:
        """Be that of a fork, which has no thread but the one that forked."""
        pending = self._pending
        self._begin_anew()
        for future in pending:
            Future.__init__(future)  # a thread that is not here may hold its lock
            future.set_running_or_notify_cancel()
            future.set_exception(
                ForkError(
                    f"waiting for {self._what!r}: expected the process that began it, found its fork {os.getpid()}; "
                    "ask the parent, or fork when it is done"
                )
            )


class _Pool:
    """The threads of the process: as many as there are tasks at one moment, for each may wait for another."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._given, self._done = threading.Condition(lock), threading.Condition(lock)
        self._acts: deque[tuple[str, Callable[[], None]]] = deque()
        self._num_idle = 0
        self._num_under_way = 0
        self._is_closed = False

    def run(self, what: str, act: Callable[[], None]) -> None:
        """Let a thread do it, which is named after it meanwhile; at the end of the process do it here."""
        needs_thread = False
        with self._given:
            is_closed = self._is_closed = self._is_closed or not _see_to_end()
            if not is_closed:
                self._num_under_way += 1
                self._acts.append((what, act))
                needs_thread = len(self._acts) > self._num_idle
                self._given.notify()
        if is_closed:
            act()
        elif needs_thread:
            self._start()

    def close(self) -> None:
        """Wait until nothing is under way; a task that comes later is done by the thread that submits it."""
        with self._done:
            self._done.wait_for(lambda: not self._num_under_way)
            self._is_closed = True

    def _start(self) -> None:
        try:
            make_thread("idle", self._work, _IDLE_S, daemon=True).start()
        except RuntimeError:  # the system gives no more threads
            self._work(0.0)

    def _work(self, idle_s: float) -> None:
        while (given := self._next(idle_s)) is not None:
            what, act = given
            if idle_s:
                threading.current_thread().name = f"remesh-{what}"
            act()
            del given, act
            with self._done:
                self._num_under_way -= 1
                self._done.notify_all()

    def _next(self, idle_s: float) -> tuple[str, Callable[[], None]] | None:
        with self._given:
            self._num_idle += 1
            self._given.wait_for(lambda: self._acts, idle_s)
            self._num_idle -= 1
            return self._acts.popleft() if self._acts else None


_pool = _Pool()
_executors: WeakSet[PooledExecutor] = WeakSet()
_endings: list[Callable[[], None]] = []
_losses: list[Callable[[], bool]] = []
_is_seen_to = _has_begun_to_end = False


def before_end(act: Callable[[], None]) -> bool:
    """Let ``act`` be called once when the main thread has come to its end, before the wait for all tasks.

    False when the end has begun: it is not called any more.
    """
    if _see_to_end() and not _has_begun_to_end:
        if act not in _endings:
            _endings.append(act)
        return True
    return False


def fail_at_end(is_lost: Callable[[], bool]) -> Callable[[], bool]:
    """Let the process end with the exit code 1 where the function says, after all tasks, that something is lost.

    Python gives nobody that ends with it a say in the exit code, so C's last functions have it.
    """
    _losses.append(is_lost)
    return is_lost


def _tell_losses() -> None:
    if any(is_lost() for is_lost in _losses):
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(ExitCode.FAILED), None)
        libc.__cxa_atexit(libc.fflush, None, None)  # the last comes first


def _see_to_end() -> bool:
    """Whether the end of the process will wait for tasks; False once it has begun."""
    global _is_seen_to
    # `atexit` comes too late: executors of others, such as the clients of stores have, take no work by then.
    register = getattr(threading, "_register_atexit", atexit.register)
    if not _is_seen_to:
        with contextlib.suppress(RuntimeError):
            register(_wait_at_end)
            _is_seen_to = True
    return _is_seen_to


def _wait_at_end() -> None:
    global _has_begun_to_end
    _has_begun_to_end = True
    for act in _endings:
        try:
            act()
        except Exception as raised:  # the others are due all the same
            logger.error("at the end of the process: %s", raised)
    _pool.close()


def _begin_anew_in_fork() -> None:
    global _pool
    _pool = _Pool()
    for executor in tuple(_executors):
        executor._leave_to_parent()
    go_on_in_fork()


atexit.register(_tell_losses)
os.register_at_fork(after_in_child=_begin_anew_in_fork)
