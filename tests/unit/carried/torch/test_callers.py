"""What a program says to its keeper is heard to its last word, also when the program has gone by then."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from remesh.carried.torch.program_lines import Callers
from remesh.wire.messages import Line, Message
from remesh.wire.token import Token

_TOKEN = Token("", b"s" * 32)
_PATIENCE_S = 20.0


class _Listener:
    """Hears what is handed on, as soon as it is let."""

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
def callers(listener: _Listener) -> Iterator[Callers]:
    with contextlib.closing(Callers(_TOKEN, listener.hear)) as made:
        yield made


def _wait_for_silence(callers: Callers) -> None:
    while not callers.is_silent():
        pass


def test_words_of_a_caller_who_has_gone_are_still_to_come_until_they_are_heard(
    callers: Callers, listener: _Listener
) -> None:
    callers.start()
    assert callers.is_silent()
    with Line.connect([callers.address], _TOKEN, "calling") as line:
        line.send({"type": "here"})
        line.send({"type": "final"})
    assert not callers.is_silent()
    listener.may_hear.set()
    listener.has_heard.wait()
    _wait_for_silence(callers)
    assert listener.heard == ["here", "final"]


def test_a_caller_whom_nobody_has_taken_yet_is_not_silence(callers: Callers) -> None:
    with socket.create_connection(callers.address):
        assert not callers.is_silent()


def test_a_caller_without_the_token_is_let_go(callers: Callers, listener: _Listener) -> None:
    callers.start()
    with Line.connect([callers.address], Token("", b"t" * 32), "calling") as line:
        line.send({"type": "final"})
        with contextlib.suppress(ConnectionError):  # hung up before it had read all
            assert line.receive(_PATIENCE_S) is None
    _wait_for_silence(callers)
    assert listener.heard == []
