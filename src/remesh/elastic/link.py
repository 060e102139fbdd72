"""How an agent and its workers talk: JSON lines over a Unix socket that only their user may open.

The link is the worker's lifeline: when it ends, the agent is gone, and the worker ends at once, so that the death of
an agent never leaves orphans behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from remesh.errors import ConfigError, PeerError

MAX_LINE_BYTES = 8 << 20
"""A longer message is a defect or an attack; a plan for 16,384 workers stays below 2 MiB."""
ORPHANED = 70
"""Exit code of a worker whose agent is gone (EX_SOFTWARE of sysexits.h)."""

Message = dict[str, Any]


class LineBuffer:
    """Cuts a byte stream into JSON messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes. PeerError when a line is too long or is no JSON object."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise PeerError(
                f"reading a message: found a line of over {MAX_LINE_BYTES} bytes; the connection is dropped"
            )
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise PeerError(f"reading a message: expected JSON, found {line[:80]!r}; connection dropped") from error
            if not isinstance(message, dict):
                raise PeerError(f"reading a message: expected a JSON object, found {line[:80]!r}; connection dropped")
            messages.append(message)
        return messages


def send_message(connection: socket.socket, message: Message) -> None:
    """Write one message; blocks while the other side does not read."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class WorkerLink:
    """The worker's end. A thread reads; urgent messages go to ``on_urgent`` at once, the others to :meth:`next`."""

    def __init__(self, path: str, on_urgent: Callable[[Message], bool]) -> None:
        self._path = path
        self._on_urgent = on_urgent
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closing = False

    def start(self) -> None:
        """Connect to the agent and begin to read. ConfigError when no agent is there."""
        try:
            self._socket.connect(self._path)
        except OSError as error:
            raise ConfigError(
                f"joining the job: no agent answers at {self._path} ({error}); start the script with `remesh run`"
            ) from error
        threading.Thread(target=self._read, name="remesh-link", daemon=True).start()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, message: Message) -> None:
        with self._lock:
            send_message(self._socket, message)

    def next(self) -> Message:
        """Block until the agent says something that is not urgent. The agent bounds the wait: it ends or we end."""
        return self._inbox.get()

    def _read(self) -> None:
        buffer = LineBuffer()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                for message in buffer.feed(data):
                    if not self._on_urgent(message):
                        self._inbox.put(message)
        if not self._closing:
            os._exit(ORPHANED)
