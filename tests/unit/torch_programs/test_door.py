"""What a program says to its keeper is heard to its last word, also when the program has gone by then."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from remesh.comm.messages import Line, Message
from remesh.comm.token import Token
from remesh.torch_programs.door import Door

_TOKEN = Token("", b"s" * 32)


class _Listener:
    """Hears what the door hands on, as soon as it is let."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.may_hear, self.has_heard = threading.Event(), threading.Event()

    def hear(self, message: Message, _: Line) -> None:
        self.may_hear.wait()
        self.heard.append(message["type"])
        if message["type"] == "final":
            self.has_heard.set()


@pytest.fixture
def listener() -> _Listener:
    return _Listener()


@pytest.fixture
def door(listener: _Listener) -> Iterator[Door]:
    with contextlib.closing(Door(_TOKEN, listener.hear)) as made:
        yield made


def _wait_for_silence(door: Door) -> None:
    while not door.is_silent():
        pass


def test_words_of_a_caller_who_has_gone_are_still_to_come_until_they_are_heard(door: Door, listener: _Listener) -> None:
    door.open()
    assert door.is_silent()
    with Line.connect([door.address], _TOKEN, "calling") as line:
        line.send({"type": "here"})
        line.send({"type": "final"})
    assert not door.is_silent()
    listener.may_hear.set()
    listener.has_heard.wait()
    _wait_for_silence(door)
    assert listener.heard == ["here", "final"]


def test_a_caller_whom_nobody_has_taken_yet_is_not_silence(door: Door) -> None:
    with socket.create_connection(door.address):
        assert not door.is_silent()


def test_a_caller_without_the_token_is_let_go(door: Door, listener: _Listener) -> None:
    door.open()
    with Line.connect([door.address], Token("", b"t" * 32), "calling") as line:
        line.send({"type": "final"})
    _wait_for_silence(door)
    assert listener.heard == []
