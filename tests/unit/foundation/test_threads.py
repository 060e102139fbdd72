"""The maker of threads and the pool: names, signals, order, and what becomes of errors."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import pytest

from remesh.foundation.thread_pool import PooledExecutor
from remesh.foundation.threads import make_thread


def _blocked_signals() -> set[int]:
    """Of the thread that calls this, as the kernel has them."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    match = re.search(r"^SigBlk:\s*([0-9a-f]+)", status, re.MULTILINE)
    assert match is not None
    mask = int(match[1], 16)
    return {number for number in range(1, 65) if mask >> number - 1 & 1}


def _seen_in_thread() -> tuple[str, set[int]]:
    seen: list[tuple[str, set[int]]] = []

    def look() -> None:
        seen.append((threading.current_thread().name, _blocked_signals()))

    thread = make_thread("look", look, daemon=True)
    thread.start()
    thread.join()
    return seen[0]


def test_a_thread_is_named_and_takes_no_signal_but_of_its_own_faults() -> None:
    before = _blocked_signals()
    name, blocked = _seen_in_thread()
    assert name == "remesh-look"
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM, signal.SIGRTMIN} <= blocked
    assert not {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL} & blocked, "faulthandler reports these"
    assert _blocked_signals() == before


def test_threads_of_the_pool_take_no_signal_and_bear_the_name_of_what_they_do() -> None:
    done = PooledExecutor(1, "look").submit(lambda: (threading.current_thread().name, _blocked_signals()))
    name, blocked = done.result()
    assert name == "remesh-look"
    assert signal.SIGUSR1 in blocked


def test_tasks_are_begun_in_order_and_at_most_so_many_at_once() -> None:
    begun: list[int] = []
    running = most = 0
    lock, gate = threading.Lock(), threading.Event()

    def act(number: int) -> int:
        nonlocal running, most
        with lock:
            begun.append(number)
            running += 1
            most = max(most, running)
        if number < 3:
            gate.wait()
        with lock:
            running -= 1
        return number * number

    with PooledExecutor(3, "count") as executor:
        futures = [executor.submit(act, number) for number in range(20)]
        gate.set()
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures] == [number * number for number in range(20)]
    assert sorted(begun) == list(range(20))
    assert most <= 3


def test_one_at_a_time_keeps_the_order() -> None:
    begun: list[int] = []
    with PooledExecutor(1, "count") as executor:
        for number in range(50):
            executor.submit(begun.append, number)
    assert begun == list(range(50))


def test_tasks_that_wait_for_tasks_get_threads() -> None:
    """The pool is not bounded: each executor bounds its own."""

    def nest(depth: int) -> int:
        return 0 if not depth else 1 + PooledExecutor(1, "nest").submit(nest, depth - 1).result()

    assert nest(20) == 20


def test_an_error_is_that_of_the_future_and_the_next_task_goes_on() -> None:
    executor = PooledExecutor(1, "fail")
    failed, fine = executor.submit(int, "x"), executor.submit(int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    assert fine.result() == 7
    assert not failed.cancel()
