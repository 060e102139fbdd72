"""How do the parts of a job talk? JSON objects in bounded frames over TCP, once a client has proved its right to.

    server                                  client
    16 random bytes                 ──>
                                    <──     SHA-256 HMAC of them under the token
    frames: length (4 bytes, big endian), JSON object     in both directions

The token is 32 random bytes in a file that only the owner of the job can read; it never crosses the network. What
arrives is data: nothing is unpickled, and nothing longer than `MAX_FRAME_BYTES` is taken.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any, Final

from remesh.errors import FormatError, PeerError

MAX_FRAME_BYTES: Final = 16 << 20
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
_LENGTH: Final = struct.Struct("!I")
_CONNECT_TIMEOUT_S: Final = 20.0
SILENCE_S: Final = 30
"""After which a host that does not answer is taken for lost. Its kernel answers, whatever its programs do."""

Message = dict[str, Any]


def pack_frame(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise PeerError(
            f"sending a message of type {message.get('type')!r}: {len(body)} bytes, at most {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages.

    >>> reader = FrameReader()
    >>> reader.feed(pack_frame({"type": "a"})[:5]), reader.feed(pack_frame({"type": "a"})[5:])
    ([], [{'type': 'a'}])
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Messages that are complete now; `FormatError` for what is none."""
        self._bytes += data
        found: list[Message] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise FormatError("oversized", f"reading a message: {length} bytes, expected at most {MAX_FRAME_BYTES}")
            if len(self._bytes) < _LENGTH.size + length:
                break
            body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            try:
                message = json.loads(body)
            except ValueError as error:
                raise FormatError("not-json", f"reading a message: {error}; the peer is not ours") from error
            if not isinstance(message, dict) or not isinstance(message.get("type"), str):
                raise FormatError("not-a-message", "reading a message: expected an object with a type")
            found.append(message)
        return found


def make_nonce() -> bytes:
    """What a server sends first."""
    return secrets.token_bytes(NONCE_BYTES)


def compute_proof(token: bytes, nonce: bytes) -> bytes:
    """What a client answers."""
    return hmac.digest(token, nonce, "sha256")


def is_proof(token: bytes, nonce: bytes, proof: bytes) -> bool:
    """Whether an answer shows that the client knows the token; takes the same time for every wrong one."""
    return hmac.compare_digest(compute_proof(token, nonce), proof)


def set_up(connection: socket.socket) -> None:
    """Send at once, and break when the other end has not answered for `SILENCE_S`: a lost host says nothing."""
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: max(SILENCE_S // 3, 1),
        socket.TCP_KEEPINTVL: max(SILENCE_S // 6, 1),
        socket.TCP_KEEPCNT: 4,
        socket.TCP_USER_TIMEOUT: SILENCE_S * 1000,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Line:
    """A client's connection; `connect` makes one. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = FrameReader()
        self._ready: list[Message] = []

    @classmethod
    def connect(cls, addresses: list[tuple[str, int]], token: bytes, what: str) -> Line:
        """Connect to the first address that answers; `PeerError` when none does."""
        problems = []
        for host, port in addresses:
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
                nonce = b""
                while len(nonce) < NONCE_BYTES:
                    part = connection.recv(NONCE_BYTES - len(nonce))
                    if not part:
                        raise OSError("it hung up at once")
                    nonce += part
                connection.sendall(compute_proof(token, nonce))
                connection.settimeout(None)
                set_up(connection)
                return cls(connection)
            except OSError as error:
                problems.append(f"{host}:{port}: {error}")
        raise PeerError(f"{what}: the job's coordinator does not answer ({'; '.join(problems)}); see whether it runs")

    def send(self, message: Message) -> None:
        """Hand a message to the network."""
        self._socket.sendall(pack_frame(message))

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when the peer has hung up; TimeoutError after ``timeout_s``."""
        self._socket.settimeout(timeout_s)
        while not self._ready:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._ready += self._reader.feed(data)
        return self._ready.pop(0)

    def close(self) -> None:
        """Hang up; a thread that receives gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
