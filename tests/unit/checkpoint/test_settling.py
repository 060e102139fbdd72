"""The end of a background save: agreed on by the loop, done by a thread, told on the loop again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from remesh.checkpoint.background.settling import Settling

PATIENCE_S = 30


def settling(agree: Callable[[], Callable[[], None]]) -> Settling:
    return Settling(agree, None, "settling a save")


def test_work_is_done_in_order_by_another_thread_and_success_is_told_on_this_one() -> None:
    order: list[tuple[str, bool]] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: order.append((what, threading.current_thread() is threading.main_thread()))

    def agree() -> Callable[[], None]:
        note("agree")()
        return note("index")

    one = settling(agree)
    one.add(note("commit"))
    one.add_on_success(note("keep"))
    one()
    assert order == [("agree", True), ("index", False), ("commit", False), ("keep", True)]


def test_a_loop_that_asks_is_never_held_up() -> None:
    may_end = threading.Event()

    def work() -> None:
        assert may_end.wait(PATIENCE_S)

    one = settling(lambda: work)
    assert not one.is_done()
    one.wait()  # for nothing, before it has begun
    one.begin()
    assert not one.is_done()
    may_end.set()
    one.wait()
    assert one.is_done()
    one()


def test_what_fails_is_raised_when_it_is_finished_and_nothing_after_it_is_done() -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    one = settling(lambda: fail)
    one.add(lambda: done.append("commit"))
    one.add_on_success(lambda: done.append("keep"))
    one.begin()
    one.wait()
    assert one.is_done()
    with pytest.raises(OSError, match="No space left"):
        one()
    assert done == []


def test_what_cannot_be_agreed_on_is_raised_at_once_and_no_thread_begins() -> None:
    def disagree() -> Callable[[], None]:
        raise ValueError("no two ranks alike")

    one = settling(disagree)
    with pytest.raises(ValueError, match="no two ranks alike"):
        one.begin()
    assert not one.is_done()
