"""A server among callers that are strangers, fall silent or do not read."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from remesh.comm import messages as frames
from remesh.comm import server
from remesh.comm.messages import NONCE_BYTES, Message, compute_proof, pack_frame
from remesh.comm.server import Caller, Server

TOKEN = bytes(range(32))


class Stage:
    """A server, and what it said of its callers."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.gone: list[Caller] = []
        self.log: list[str] = []
        self.server = Server(TOKEN, lambda _, message: self.heard.append(message), self.gone.append, self.log.append)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.server.listen(listener)
        self.lines: list[socket.socket] = []

    def call(self) -> socket.socket:
        line = socket.create_connection(self.address, timeout=10)
        self.lines.append(line)
        self.server.poll(10)
        return line

    def call_with_proof(self) -> socket.socket:
        line = self.call()
        line.sendall(compute_proof(TOKEN, line.recv(NONCE_BYTES, socket.MSG_WAITALL)))
        self.server.poll(10)
        return line

    @property
    def caller(self) -> Caller:
        (caller,) = self.server.callers.values()
        return caller


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.server.close()
    for line in stage.lines:
        line.close()


def test_who_has_shown_the_token_is_heard_and_told(stage: Stage) -> None:
    line = stage.call_with_proof()
    line.sendall(pack_frame({"type": "look"}))
    stage.server.poll(10)
    assert stage.heard == [{"type": "look"}]
    stage.server.tell(stage.caller, {"type": "state"})
    assert line.recv(100) == pack_frame({"type": "state"})
    assert not stage.log and not stage.gone


def test_who_does_not_show_the_token_in_time_is_hung_up_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    known, silent = stage.call_with_proof(), stage.call()
    monkeypatch.setattr(server, "_PROOF_LIMIT_S", 0.0)
    stage.server.poll(0)
    assert silent.recv(NONCE_BYTES) and not silent.recv(1)
    assert stage.caller.socket.getpeername() == known.getsockname()
    assert len(stage.gone) == 1 and "did not show the token" in stage.log[0]


def test_who_does_not_read_is_hung_up_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.call_with_proof()
    monkeypatch.setattr(server, "_SEND_LIMIT_BYTES", 1 << 20)
    long = {"type": "state", "text": "." * (1 << 20)}
    for _ in range(64):  # what the kernel takes is not counted
        if stage.gone:
            break
        stage.server.tell(stage.caller, long)
    assert len(stage.gone) == 1 and not stage.server.callers
    stage.server.tell(stage.gone[0], long)


def test_who_has_gone_first_is_heard_of_first_though_another_is_told_something(stage: Stage) -> None:
    lines = [stage.call_with_proof(), stage.call_with_proof()]
    second, first = stage.server.callers.values()
    for line in reversed(lines):
        line.close()
    for _ in range(3):
        stage.server.tell(second, {"type": "state"})
    assert not stage.gone
    stage.server.poll(10)
    stage.server.poll(0)
    assert stage.gone == [first, second] and not stage.server.callers


def test_a_line_to_a_silent_host_breaks_by_itself(stage: Stage) -> None:
    stage.call()
    ours = stage.caller.socket
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    silence_s = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
    assert silence_s == frames.SILENCE_S
    idle_s, interval_s, count = (
        ours.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle_s + interval_s * count <= silence_s
