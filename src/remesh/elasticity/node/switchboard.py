"""Unix socket server of an agent, with a connection to each of its workers.

Other agents connect only to see whether it lives.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from remesh.elasticity.health.agent_side import HealthReport, PaceReport, StackReport
from remesh.elasticity.health.verdicts import RankStack
from remesh.elasticity.link import token_path
from remesh.elasticity.membership.instructions import (
    Event,
    WorkerDone,
    WorkerFailed,
    WorkerLeft,
    WorkerReady,
    WorkerSuspects,
)
from remesh.elasticity.model.generation import WorkerReport
from remesh.elasticity.model.outcome import Category
from remesh.foundation.errors import FormatError
from remesh.foundation.settings import timeout_s
from remesh.wire.listening import listen_at
from remesh.wire.messages import Message
from remesh.wire.server import Peer, Server
from remesh.wire.token import Token

SEND_TIMEOUT_S = timeout_s(5.0)
"""How long a worker may leave a message unread."""
_CALL_TIMEOUT_S = timeout_s(1.0)
"""How long a connection that wakes an agent may take: later it has looked by itself."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """Buffers that a worker made for its snapshots, to be kept by the agent too."""

    generation: int
    rank: int
    pid: int
    descriptors: list[int]


@dataclass(frozen=True, slots=True)
class Deaf:
    """A worker does not read what it is sent."""

    slot: int


@dataclass(frozen=True, slots=True)
class HungUp:
    """The connection to a worker was closed."""

    reason: str


Received = Event | HealthReport | SnapshotOffer | Deaf | HungUp


class Switchboard:
    """The agent's end of all links. A context manager: left, it listens no more."""

    def __init__(self, folder: Path, address: str) -> None:
        self.path = folder / "link"
        """Where workers find it."""
        self._links: dict[int, Peer] = {}
        self._received: list[Received] = []
        self._lives: dict[int, int] = {}
        """By slot, a descriptor that is readable once the process there has ended."""
        self._calls: deque[tuple[float, socket.socket]] = deque()
        """Connections to agents that were woken, and since when: kept until they are made."""
        token = Token("", secrets.token_bytes(32))
        with open(token_path(self.path), "xb", opener=_only_mine) as file:
            file.write(token.secret)
        self._server = Server(token, self._take, self._on_gone, self._note_refused, patience_s=SEND_TIMEOUT_S)
        links = socket.socket(socket.AF_UNIX)
        links.bind(str(self.path))
        links.listen()
        self._server.listen(links)
        pulse = listen_at(address)
        self._server.show_life(pulse)
        self.pulse_port: int = pulse.getsockname()[1]
        """A connection there that is refused proves that this agent is gone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._links.clear()
        for slot in list(self._lives):
            self._forget_life(slot)
        while self._calls:
            self._calls.popleft()[1].close()
        self._server.close()

    def wait(self, timeout_s: float) -> list[Received]:
        """The messages that come within this time; they are polled at least once."""
        self._server.poll(timeout_s)
        while self._calls and time.monotonic() - self._calls[0][0] > _CALL_TIMEOUT_S:
            self._calls.popleft()[1].close()
        heard, self._received = self._received, []
        return heard

    def wake(self, places: Iterable[tuple[str, int]]) -> None:
        """Have the agents there end their `wait` now; waits for none of them.

        A connection to their pulse does it. An address that is a name is left out: to look it up may take long.
        """
        for address, port in places:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):
                (found, *_) = socket.getaddrinfo(address, port, family, flags=socket.AI_NUMERICHOST)
                call = socket.socket(family)
                self._calls.append((time.monotonic(), call))
                call.setblocking(False)
                call.connect_ex(found[4])

    def watch(self, slot: int, pid: int) -> None:
        """The process in this slot: its end ends a `wait`."""
        with contextlib.suppress(OSError):  # a kernel without pidfd: the waiting thread polls
            self._lives[slot] = os.pidfd_open(pid)
            self._server.watch(self._lives[slot])

    def __contains__(self, slot: int) -> bool:
        """Whether the worker in this slot has connected."""
        return slot in self._links

    def send(self, slot: int, message: Mapping[str, Any]) -> None:
        """Send a message to a worker that has connected; nothing when it is gone, its exit comes as an event."""
        self._server.tell(self._links[slot], dict(message))

    def drop(self, slot: int) -> None:
        """The worker in this slot has ended."""
        self._forget_life(slot)
        if (peer := self._links.pop(slot, None)) is not None:
            self._server.drop(peer)

    def _forget_life(self, slot: int) -> None:
        if (life := self._lives.pop(slot, None)) is not None:
            self._server.forget(life)
            os.close(life)

    def _take(self, peer: Peer, message: Message) -> None:
        heard = read_message(message)
        if isinstance(heard, WorkerReady):
            self._links[heard.report.slot] = peer
        self._received.append(heard)

    def _on_gone(self, peer: Peer) -> None:
        self._received += [Deaf(slot) for slot, link in self._links.items() if link is peer and peer.is_deaf]

    def _note_refused(self, reason: str) -> None:
        self._received.append(HungUp(reason))


def read_message(message: Message) -> Event | HealthReport | SnapshotOffer:
    """What a worker's message stands for; FormatError, KeyError, TypeError or ValueError for what makes no sense."""
    match message["type"]:
        case "ready":
            return WorkerReady(WorkerReport(**message["report"]))
        case "left":
            return WorkerLeft(WorkerReport(**message["report"]))
        case "done":
            return WorkerDone(int(message["generation"]), WorkerReport(**message["report"]))
        case "suspect":
            return WorkerSuspects(int(message["slot"]), int(message["generation"]), str(message["text"]))
        case "failed":
            category = Category(message.get("category", Category.WORKER.value))
            return WorkerFailed(int(message["slot"]), str(message["text"]), category)
        case "keep":
            descriptors = [int(one) for one in message["descriptors"]]
            return SnapshotOffer(int(message["generation"]), int(message["rank"]), int(message["pid"]), descriptors)
        case "progress":
            busy_s = None if message["busy_s"] is None else float(message["busy_s"])
            return PaceReport(int(message["slot"]), int(message["generation"]), busy_s, int(message["step"]))
        case "stack":
            return StackReport(int(message["slot"]), int(message["generation"]), RankStack(**message["stack"]))
        case other:
            raise FormatError(
                "unknown-message",
                f"reading a worker's message: unknown type {other!r}; worker and agent differ in version",
            )


def _only_mine(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
