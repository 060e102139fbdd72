"""HTTP server of one text at ``/metrics`` on a loopback port, without authentication.

A request is at most a few KiB and must be complete within a second, else its connection is dropped; more connections at
once than MAX_CONNECTIONS are dropped unheard. So slow, half-open and garbage connections cost a few idle threads for a
second, and nothing else.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from remesh.elasticity.telemetry.metrics import CONTENT_TYPE
from remesh.foundation.errors import ConfigError
from remesh.wire.reception import Reception

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 32


class MetricsServer(Reception):
    """A context manager; ``port`` is known once it is made."""

    def __init__(self, port: int, render: Callable[[], str]) -> None:
        self._render = render
        try:
            listener = socket.create_server((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"serving metrics: port {port} of {LOOPBACK} cannot be used ({error}); give another --metrics-port"
            ) from error
        super().__init__(listener, self._answer_one, name="metrics", max_callers=MAX_CONNECTIONS)

    def _answer_one(self, connection: socket.socket) -> None:
        if request := _read_request(connection):
            connection.sendall(self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        line = request.split(b"\r\n", 1)[0]
        if line.startswith(b"GET /metrics ") and line.endswith((b" HTTP/1.1", b" HTTP/1.0")):
            return _response("200 OK", CONTENT_TYPE, self._render())
        if line.startswith(b"GET "):
            return _response("404 Not Found", "text/plain", "metrics are at /metrics\n")
        return _response("400 Bad Request", "text/plain", "expected GET /metrics\n")


def _read_request(connection: socket.socket) -> bytes:
    """The head of one request; nothing when it is too long or too slow."""
    deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
    data = b""
    while b"\r\n\r\n" not in data:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or len(data) > MAX_REQUEST_BYTES:
            return b""
        connection.settimeout(left_s)
        more = connection.recv(4096)
        if not more:
            return b""
        data += more
    connection.settimeout(REQUEST_TIMEOUT_S)
    return data


def _response(status: str, content_type: str, body: str) -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(data)}",
        "Connection: close",
    )
    return "\r\n".join([*head, "", ""]).encode() + data
