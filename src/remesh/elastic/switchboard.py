"""Who speaks to an agent? Its workers, over a Unix socket in its folder; other agents, to see whether it lives."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from remesh.comm.messages import Message
from remesh.comm.server import Peer, Server
from remesh.comm.token import Token
from remesh.elastic.link import token_path

SEND_TIMEOUT_S = 5.0
"""How long a worker may leave a message unread."""


class Switchboard:
    """The agent's end of all links. A context manager: left, it listens no more.

    ``on_message`` takes what workers say, ``on_deaf`` the slot of a worker that does not read, ``log`` why somebody was
    hung up on.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        on_message: Callable[[Peer, Message], None],
        on_deaf: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self.path = folder / "link"
        """Where workers find it."""
        self._on_deaf = on_deaf
        self._links: dict[int, Peer] = {}
        token = Token("", secrets.token_bytes(32))
        with open(token_path(self.path), "xb", opener=_only_mine) as file:
            file.write(token.secret)
        self._server = Server(token, on_message, self._on_gone, log, patience_s=SEND_TIMEOUT_S)
        links = socket.socket(socket.AF_UNIX)
        links.bind(str(self.path))
        links.listen()
        self._server.listen(links)
        pulse = socket.create_server((address, 0))
        self._server.show_life(pulse)
        self.pulse_port: int = pulse.getsockname()[1]
        """A connection there that is refused proves that this agent is gone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._links.clear()
        self._server.close()

    def wait(self, timeout_s: float) -> None:
        """Take what comes within this time, at least one look."""
        self._server.poll(timeout_s)

    def bind(self, slot: int, peer: Peer) -> None:
        """The worker in this slot speaks here from now on."""
        self._links[slot] = peer

    def __contains__(self, slot: int) -> bool:
        """Whether the worker in this slot has called in."""
        return slot in self._links

    def send(self, slot: int, message: Mapping[str, Any]) -> None:
        """Say something to a worker that has called in; nothing when it is gone, its exit comes as an event."""
        self._server.tell(self._links[slot], dict(message))

    def drop(self, slot: int) -> None:
        """The worker in this slot has ended."""
        if (peer := self._links.pop(slot, None)) is not None:
            self._server.drop(peer)

    def _on_gone(self, peer: Peer) -> None:
        slot = next((slot for slot, link in self._links.items() if link is peer), None)
        if slot is not None and peer.is_deaf:
            self._on_deaf(slot)


def _only_mine(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
