"""Authenticated message protocol between a job's processes: JSON objects in bounded frames with an HMAC.

    server                                  client
    32 random bytes, the nonce      ──>
                                    <──     a frame without a message
    frames                         <──>     frames

    frame    length of the body (4 bytes, big endian), proof (32 bytes), body: a JSON object
    proof    HMAC-SHA256 of the sender's role, the frame's number and its body, under a key of token and nonce

The token never crosses the network. A frame fits in one place of one connection: no frame can be replayed, changed,
left out or reflected to its sender. What arrives is data: it is read once its proof fits, nothing is unpickled, and
nothing longer than `MAX_FRAME_BYTES` is accepted, and much less before the peer has proved itself.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from remesh.foundation.errors import FormatError, PeerError
from remesh.foundation.settings import timeout_s
from remesh.wire.token import MAC_BYTES, Token

if TYPE_CHECKING:
    from remesh.wire.tls import Tls

MAX_FRAME_BYTES: Final = 50 << 20
"""A value of 8 MiB, the most that torch's own store takes, with six bytes of JSON for each of its bytes."""
MAX_OPENING_BYTES: Final = 4 << 10
"""Of a server's caller that has not shown the token yet."""
NONCE_BYTES: Final = 32
_HEAD: Final = struct.Struct(f"!I{MAC_BYTES}s")
_NUMBER: Final = struct.Struct("!Q")
_CONNECT_TIMEOUT_S: Final = timeout_s(20.0)
SILENCE_TIMEOUT_S: Final = 30
"""After which a host that does not answer is taken for lost. Its kernel answers, whatever its programs do."""
_CHUNK_BYTES: Final = 1 << 20

Message = dict[str, Any]
Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


class Role(enum.Enum):
    """The two sides of a connection."""

    SERVER = b"server"
    CLIENT = b"client"

    @property
    def other(self) -> Role:
        return Role.CLIENT if self is Role.SERVER else Role.SERVER


class Conversation:
    """One end of a connection, without the connection: messages to bytes, bytes to messages.

    >>> server, client = (Conversation(Token("job", b"secret"), b"nonce", role) for role in Role)
    >>> server.feed(client.prove()), server.is_proven, server.feed(client.pack({"type": "look"}))
    ([], True, [{'type': 'look'}])
    """

    def __init__(self, token: Token, nonce: bytes, role: Role) -> None:
        self._key = token.sign("connection", nonce)
        self._role = role
        self._num_sent = 0
        self._num_received = 0
        self._bytes = bytearray()

    @property
    def is_proven(self) -> bool:
        """Whether the other end has shown that it knows the token."""
        return self._num_received > 0

    def prove(self) -> bytes:
        """A frame without a message."""
        return self._pack(b"")

    def pack(self, message: Message) -> bytes:
        """The bytes of one message; they must be sent in the order in which they were packed."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise PeerError(
                f"sending a message of type {message.get('type')!r}: {len(body)} bytes, at most {MAX_FRAME_BYTES}"
            )
        return self._pack(body)

    def feed(self, data: bytes) -> list[Message]:
        """Messages that are complete now; `FormatError` for what is none, or not of a sender that knows the token."""
        self.add(data)
        found = []
        while (message := self.take()) is not None:
            found.append(message)
        return found

    def add(self, data: bytes) -> None:
        """Bytes that arrived, for `take` and `take_rest`."""
        self._bytes += data

    def take(self) -> Message | None:
        """The next message of what arrived, if it is complete; `FormatError` as `feed`."""
        while len(self._bytes) >= _HEAD.size:
            length, proof = _HEAD.unpack_from(self._bytes)
            limit = MAX_FRAME_BYTES if self.is_proven or self._role is Role.CLIENT else MAX_OPENING_BYTES
            if length > limit:
                raise FormatError("oversized", f"reading a message: {length} bytes, expected at most {limit}")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                break
            body = bytes(self._bytes[_HEAD.size : end])
            if not hmac.compare_digest(proof, self._proof(self._role.other, self._num_received, body)):
                raise FormatError("no-proof", "reading a message: the sender does not have the job's token")
            del self._bytes[:end]
            self._num_received += 1
            if body:
                return _read(body)
        return None

    def take_rest(self, num_bytes: int) -> bytes:
        """Up to so many of the bytes that arrived and are part of no message yet: they belong to a payload."""
        rest = bytes(self._bytes[:num_bytes])
        del self._bytes[:num_bytes]
        return rest

    def _pack(self, body: bytes) -> bytes:
        proof = self._proof(self._role, self._num_sent, body)
        self._num_sent += 1
        return _HEAD.pack(len(body), proof) + body

    def _proof(self, role: Role, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, role.value + _NUMBER.pack(number) + body, "sha256")


def make_nonce() -> bytes:
    """A fresh random nonce, the first message of a server."""
    return os.urandom(NONCE_BYTES)


def set_up(connection: socket.socket) -> None:
    """Send at once, and break when the other end has not answered for `SILENCE_TIMEOUT_S`: its host is lost."""
    if connection.family == socket.AF_UNIX:
        return
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: max(SILENCE_TIMEOUT_S // 3, 1),
        socket.TCP_KEEPINTVL: max(SILENCE_TIMEOUT_S // 6, 1),
        socket.TCP_KEEPCNT: 4,
        socket.TCP_USER_TIMEOUT: SILENCE_TIMEOUT_S * 1000,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Line:
    """A connection that blocks: `connect` makes a client's, `answer` a server's. Threads may send while one receives.

    ``patience_s`` bounds each wait for the other end; None waits as long as it holds. A context manager.
    """

    def __init__(self, connection: socket.socket, conversation: Conversation, patience_s: float | None) -> None:
        self._socket = connection
        self._conversation = conversation
        self._patience_s = patience_s
        self._sending = threading.Lock()
        connection.settimeout(patience_s)

    @classmethod
    def connect(
        cls,
        addresses: Sequence[Address],
        token: Token,
        what: str,
        *,
        connect_s: float = _CONNECT_TIMEOUT_S,
        patience_s: float | None = None,
        tls: Tls | None = None,
    ) -> Self:
        """Connect to the first address that answers; `PeerError`, which begins with ``what``, when none does in time.

        ``connect_s`` bounds each wait until there is a connection.
        """
        problems = []
        for address in addresses:
            with contextlib.ExitStack() as stack:
                try:
                    connection = stack.enter_context(_open(address, connect_s))
                    if tls is not None:
                        connection = stack.enter_context(tls.context(is_server=False).wrap_socket(connection))
                    conversation = Conversation(token, _receive_nonce(connection), Role.CLIENT)
                    connection.sendall(conversation.prove())
                    set_up(connection)
                except OSError as error:
                    where = address if isinstance(address, str) else "{}:{}".format(*address)
                    problems.append(f"{where}: {error}")
                    continue
                stack.pop_all()
                return cls(connection, conversation, patience_s)
        raise PeerError(f"{what}: no process answers ({'; '.join(problems)}); check that it runs and can be reached")

    @classmethod
    def answer(cls, connection: socket.socket, token: Token, *, patience_s: float) -> Self:
        """The server's end of a connection that was accepted, once the client has shown the token. Does not close it.

        OSError when it does not within ``patience_s``, FormatError when it shows another.
        """
        set_up(connection)
        deadline_s = time.monotonic() + patience_s
        nonce = make_nonce()
        line = cls(connection, Conversation(token, nonce, Role.SERVER), patience_s)
        connection.sendall(nonce)
        while not line._conversation.is_proven:
            connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            data = connection.recv(_HEAD.size)
            if not data:
                raise ConnectionResetError("the caller closed the connection before it proved that it has the token")
            line._conversation.add(data)
            if line._conversation.take() is not None:
                raise FormatError("not-a-proof", "taking a caller: expected a frame without a message first")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor of its connection."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Hand a message to the network."""
        with self._sending:
            self._socket.sendall(self._conversation.pack(message))

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when the peer has hung up; TimeoutError after ``timeout_s``, else the patience."""
        self._socket.settimeout(self._patience_s if timeout_s is None else timeout_s)
        while (message := self._conversation.take()) is None:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._conversation.add(data)
        return message

    def send_payload(self, data: memoryview) -> None:
        """Send bytes as they are; a message before has given their number."""
        with self._sending:
            for start in range(0, len(data), _CHUNK_BYTES):
                self._socket.sendall(data[start : start + _CHUNK_BYTES])

    def receive_payload(self, room: memoryview) -> None:
        """Fill the room with what `send_payload` sent; ConnectionResetError when the peer hangs up before."""
        rest = self._conversation.take_rest(len(room))
        room[: len(rest)] = rest
        at = len(rest)
        while at < len(room):
            count = self._socket.recv_into(room[at : at + _CHUNK_BYTES])
            if not count:
                raise ConnectionResetError(f"the connection was closed after {at} of {len(room)} bytes")
            at += count

    def close(self) -> None:
        """Hang up; a thread that receives gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _open(address: Address, timeout_s: float) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _receive_nonce(connection: socket.socket) -> bytes:
    nonce = b""
    while len(nonce) < NONCE_BYTES:
        part = connection.recv(NONCE_BYTES - len(nonce))
        if not part:
            raise ConnectionResetError("it hung up at once")
        nonce += part
    return nonce


def _read(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise FormatError("not-json", f"reading a message: {error}; the sender is not a process of this job") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise FormatError("not-a-message", "reading a message: expected an object with a type")
    return message
