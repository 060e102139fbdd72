"""A server among callers that are strangers, fall silent or do not read."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from remesh.wire import messages as frames, server
from remesh.wire.messages import NONCE_BYTES, Conversation, Message, Role
from remesh.wire.server import Peer, Server
from remesh.wire.token import Token

TOKEN = Token("job", bytes(range(32)))


class Stage:
    """A server, and what it said of its callers."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.gone: list[Peer] = []
        self.log: list[str] = []
        self.server = Server(TOKEN, lambda _, message: self.heard.append(message), self.gone.append, self.log.append)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.server.listen(listener)
        self.lines: list[socket.socket] = []

    def call(self) -> socket.socket:
        line = socket.create_connection(self.address, timeout=100)
        self.lines.append(line)
        self.server.poll(100)
        return line

    def call_with_proof(self, token: Token = TOKEN) -> tuple[socket.socket, Conversation]:
        line = self.call()
        conversation = Conversation(token, line.recv(NONCE_BYTES, socket.MSG_WAITALL), Role.CLIENT)
        line.sendall(conversation.prove())
        self.server.poll(100)
        return line, conversation

    @property
    def caller(self) -> Peer:
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
    line, conversation = stage.call_with_proof()
    line.sendall(conversation.pack({"type": "look"}))
    stage.server.poll(10)
    assert stage.heard == [{"type": "look"}]
    stage.server.tell(stage.caller, {"type": "state"})
    assert conversation.feed(line.recv(100)) == [{"type": "state"}]
    assert not stage.log and not stage.gone


def test_who_does_not_show_the_token_in_time_is_hung_up_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    (known, _), silent = stage.call_with_proof(), stage.call()
    monkeypatch.setattr(server, "_PROOF_TIMEOUT_S", 0.0)
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


def test_who_leaves_a_message_unread_for_too_long_is_hung_up_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.call_with_proof()
    caller = stage.caller
    monkeypatch.setattr(stage.server, "_patience_s", 0.0)
    for _ in range(1000):  # what the kernel takes is not counted
        stage.server.poll(0)
        if stage.gone:
            break
        stage.server.tell(caller, {"type": "state", "text": "." * 100_000})
    assert stage.gone == [caller] and caller.is_deaf and "did not read" in stage.log[0]


def test_who_reads_while_the_server_is_busy_elsewhere_stays(stage: Stage) -> None:
    """It stood still for longer than callers may: what they have read meanwhile counts before its clock does."""
    line, _ = stage.call_with_proof()
    caller, num_read = stage.caller, 0
    while not caller.out:
        stage.server.tell(caller, {"type": "state", "text": "." * 100_000})
    stage.server._patience_s, caller.unread_s = 5.0, 0.0
    while num_read < 1 << 20:
        num_read += len(line.recv(1 << 20))
    stage.server.poll(0)
    assert not stage.gone and caller.unread_s > 0.0


def test_a_stranger_is_turned_away_unheard(stage: Stage) -> None:
    line, _ = stage.call_with_proof(Token("job", b"another-secret-of-a-stranger"))
    assert not line.recv(1) and not stage.heard and not stage.server.callers
    assert "turned away" in stage.log[0] and not stage.gone[0].is_deaf


def test_nothing_more_is_heard_of_who_has_talked_nonsense(stage: Stage) -> None:
    line, conversation = stage.call_with_proof()
    line.sendall(conversation.pack({"type": "a"}) + conversation._pack(b"[]") + conversation.pack({"type": "b"}))
    stage.server.poll(10)
    assert stage.heard == [{"type": "a"}]
    assert not stage.server.callers and len(stage.gone) == 1 and "expected an object" in stage.log[0]


def test_many_who_say_nothing_keep_others_waiting_and_no_known_one_from_being_heard(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 3)
    line, conversation = stage.call_with_proof()
    for _ in range(3):
        stage.call()
    late = socket.create_connection(stage.address, timeout=100)
    stage.lines.append(late)
    for _ in range(3):
        stage.server.poll(0)
    assert len(stage.server.callers) == 4
    line.sendall(conversation.pack({"type": "look"}))
    stage.server.poll(10)
    assert stage.heard == [{"type": "look"}]
    with monkeypatch.context() as patch:
        patch.setattr(server, "_PROOF_TIMEOUT_S", 0.0)  # the strangers' time is over
        stage.server.poll(0)
    stage.server.poll(10)
    assert len(stage.gone) == 3 and len(stage.server.callers) == 2
    assert len(late.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES


def test_who_looks_for_life_finds_it_and_no_more(stage: Stage) -> None:
    pulse = socket.create_server(("127.0.0.1", 0))
    stage.server.show_life(pulse)
    with socket.create_connection(pulse.getsockname(), 10) as line:
        stage.server.poll(10)
        assert not line.recv(1)
    assert not stage.server.callers and not stage.gone and not stage.log


def test_who_has_gone_first_is_heard_of_first_though_another_is_told_something(stage: Stage) -> None:
    lines = [stage.call_with_proof()[0], stage.call_with_proof()[0]]
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
    assert silence_s == frames.SILENCE_TIMEOUT_S
    idle_s, interval_s, count = (
        ours.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle_s + interval_s * count <= silence_s


def test_a_watched_descriptor_ends_a_look_early_until_it_is_forgotten(stage: Stage) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stage.server.watch(ours.fileno())
        theirs.send(b"!")
        stage.server.poll(1_000)  # would outlast the test
        stage.server.forget(ours.fileno())
        stage.server.poll(0)
