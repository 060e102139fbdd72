"""Calls that an exception leaves, as a handler of signals may raise one: their slots, and the memory they speak of."""

from __future__ import annotations

import gc
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remesh.mpi.calls.table import BY_NAME
from remesh.mpi.calls.words import NUM_SLOTS
from remesh.mpi.channel import SharedChannel
from remesh.mpi.upper import link as link_module
from remesh.mpi.upper.link import Link, call_shortly

_FIRST_SLOT = 1 << 16


class _Buffer:
    """What a call reads from or writes to."""


def _in_a_thread(function: Callable[[], Any]) -> None:
    """Slots belong to threads: this one has none before, and gives its own back."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for a slot"
    if problems:
        raise problems[0]


class _Interrupted(Exception):
    """Raised by a handler of signals."""


def _post(channel: SharedChannel, slot: int) -> None:
    start = _FIRST_SLOT * (1 + slot)
    (number,) = struct.unpack_from("<I", channel._view, start)
    struct.pack_into("<I", channel._view, start, number + 1)


@pytest.mark.parametrize("is_short", [False, True])
def test_a_slot_that_an_exception_left_is_used_again_and_keeps_what_its_call_speaks_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    lower = SharedChannel.create(str(tmp_path / "channel"))
    link = Link(SharedChannel.map(str(tmp_path / "channel")))
    monkeypatch.setattr(link_module, "_link", link)

    def leave(slot: int) -> None:
        _post(lower, slot)
        raise _Interrupted

    monkeypatch.setattr(link._channel, "call", leave)

    def interrupted() -> None:
        buffer = _Buffer()
        kept = weakref.ref(buffer)
        link_module.port()
        slot, _ = link_module._mine.slot
        with pytest.raises(_Interrupted):
            if is_short:
                call_shortly(lambda _: leave(slot), buffer)
            else:
                link.ask(BY_NAME["hello"], (), keep=buffer)
        del buffer
        assert kept() is not None and lower.pending() >> slot & 1
        # Its reply comes late, and a later call takes the slot.
        lower.answer(slot)
        buffers.append(kept)

    buffers: list[weakref.ref[_Buffer]] = []
    for _ in range(2 * NUM_SLOTS):
        _in_a_thread(interrupted)
    _in_a_thread(link_module.port)
    gc.collect()
    assert all(kept() is None for kept in buffers), "what is answered needs nothing any more"


def test_a_slot_is_not_used_again_before_its_call_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = SharedChannel.create(str(tmp_path / "channel"))
    link = Link(SharedChannel.map(str(tmp_path / "channel")))
    monkeypatch.setattr(link_module, "_link", link)
    left: list[int] = []

    def leave() -> None:
        link_module.port()
        left.append(link_module._mine.slot[0])
        _post(lower, left[-1])
        link.leave_slot(None)

    for _ in range(NUM_SLOTS):
        _in_a_thread(leave)
    assert sorted(left) == list(range(NUM_SLOTS))
    answer = threading.Timer(0.05, lower.answer, (left[4],))
    answer.start()
    _in_a_thread(leave)
    answer.join()
    assert left[-1] == left[4]
