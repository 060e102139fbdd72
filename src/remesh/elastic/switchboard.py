"""Who speaks to an agent? Its workers, over a Unix socket in its folder; other agents, to see whether it lives."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from remesh.elastic.link import LineBuffer, Message, send_message
from remesh.errors import PeerError

SEND_TIMEOUT_S = 5.0
"""How long a worker may leave a message unread."""

Listener = Callable[[socket.socket, Message], bool]
"""Takes a message and where it came from; whether it made sense: if not, its sender is dropped."""


class Switchboard:
    """The agent's end of all links. A context manager: left, it listens no more."""

    def __init__(self, folder: Path, address: str) -> None:
        self.path = folder / "link"
        """Where workers find it."""
        self._address = address
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, socket.socket] = {}

    def __enter__(self) -> Self:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        self._pulse = socket.create_server((self._address, 0))
        self.pulse_port: int = self._pulse.getsockname()[1]
        """A connection there that is refused proves that this agent is gone."""
        for server in (self._server, self._pulse):
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._pulse.close()

    def wait(self, timeout_s: float, listener: Listener) -> None:
        """Take what comes within this time, at least one look."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                # Who knocked may be gone again.
                with contextlib.suppress(OSError):
                    connection, _ = self._server.accept()
                    connection.settimeout(SEND_TIMEOUT_S)
                    self._selector.register(connection, selectors.EVENT_READ, LineBuffer())
            elif key.fileobj is self._pulse:
                with contextlib.suppress(OSError):
                    self._pulse.accept()[0].close()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj, key.data, listener)

    def bind(self, slot: int, connection: socket.socket) -> None:
        """The worker in this slot speaks here from now on."""
        self._links[slot] = connection

    def __contains__(self, slot: int) -> bool:
        """Whether the worker in this slot has called in."""
        return slot in self._links

    def send(self, slot: int, message: Mapping[str, Any]) -> None:
        """Say something to a worker that has called in; nothing when it is gone. TimeoutError when it does not read."""
        try:
            send_message(self._links[slot], dict(message))
        except TimeoutError:
            raise
        except OSError:
            # It is gone; its exit comes as an event.
            return

    def drop(self, slot: int) -> None:
        """The worker in this slot has ended."""
        connection = self._links.pop(slot, None)
        if connection is not None and connection.fileno() >= 0:
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()

    def _read(self, connection: socket.socket, buffer: LineBuffer, listener: Listener) -> None:
        try:
            data = connection.recv(1 << 16)
            messages = buffer.feed(data)
        except (OSError, PeerError):
            data, messages = b"", []
        for message in messages:
            if not listener(connection, message):
                data = b""
                break
        if not data and connection.fileno() >= 0:
            self._selector.unregister(connection)
            connection.close()
