"""Server end of `remesh.wire.messages.Line`: accepts connections, authenticates each, receives messages.

One thread, one `Server.poll` at a time, nothing that blocks. A caller that sends what no caller may send, does not
prove itself in time, or does not read what it is sent, is disconnected; the leader of the job decides what that means.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from remesh.foundation.errors import Error
from remesh.foundation.settings import timeout_s
from remesh.wire.messages import Conversation, Message, Role, make_nonce, set_up
from remesh.wire.token import Token

_PROOF_TIMEOUT_S = timeout_s(20.0)
"""For a caller to show that it knows the token."""
MAX_STRANGERS = 64
"""Callers that have not shown it yet; more wait in the kernel's queue until some have, or are hung up on."""
_SEND_LIMIT_BYTES = 64 << 20
"""A caller that lets this much pile up does not read any more."""
_READ_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class Peer:
    """A connection."""

    socket: socket.socket
    conversation: Conversation
    came_s: float
    out: bytearray = field(default_factory=bytearray)
    unread_s: float = math.inf
    """Since when it has not taken anything of ``out``."""
    is_deaf: bool = False
    """The server closed its connection because it did not read what it was sent."""

    @property
    def is_known(self) -> bool:
        """Whether it has shown that it knows the token."""
        return self.conversation.is_proven


class Server:
    """Connections to callers; `poll` moves them on."""

    def __init__(
        self,
        token: Token,
        on_message: Callable[[Peer, Message], None],
        on_gone: Callable[[Peer], None],
        log: Callable[[str], None],
        *,
        patience_s: float = math.inf,
    ) -> None:
        """``on_message`` is called for what known callers send, ``on_gone`` once for each whose connection ends.

        ``patience_s`` is how long a caller may leave unread what it is sent.
        """
        self._token = token
        self._on_message, self._on_gone, self._log = on_message, on_gone, log
        self._patience_s = patience_s
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[socket.socket, Callable[[socket.socket], None]] = {}
        self._is_accepting = True
        self.callers: dict[socket.socket, Peer] = {}

    def listen(self, listener: socket.socket) -> None:
        """Take connections from this listening socket too."""
        self._add(listener, self._welcome)

    def show_life(self, listener: socket.socket) -> None:
        """Take connections from this listening socket and close them at once: a peer sees that this process lives."""
        self._add(listener, socket.socket.close)

    def watch(self, descriptor: int) -> None:
        """End a `poll` early as long as this descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def forget(self, descriptor: int) -> None:
        """No longer `watch` it."""
        self._selector.unregister(descriptor)

    def poll(self, wait_s: float) -> None:
        """Receive what callers have sent, and send what still waits; wait for more at most ``wait_s``."""
        self._set_accepting(sum(not caller.is_known for caller in self.callers.values()) < MAX_STRANGERS)
        for key, _ in self._selector.select(wait_s):
            if (welcome := self._listeners.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                # The caller may be gone again.
                with contextlib.suppress(OSError):
                    welcome(key.fileobj.accept()[0])  # type: ignore[union-attr]
            elif (caller := self.callers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._take(caller)
        for caller in list(self.callers.values()):
            # Before it is judged: what it has read while this process was busy elsewhere counts.
            self._flush(caller)
            now_s = time.monotonic()
            if not caller.is_known and now_s - caller.came_s > _PROOF_TIMEOUT_S:
                self._hang_up(caller, f"a caller that did not show the token within {_PROOF_TIMEOUT_S:g} s")
            elif now_s - caller.unread_s > self._patience_s:
                self._give_up(caller, f"did not read a message for {self._patience_s:g} s")

    def tell(self, caller: Peer, message: Message) -> None:
        """Send a message to a caller; nothing happens if it has gone."""
        caller.out += caller.conversation.pack(message)
        self._flush(caller)

    def close(self) -> None:
        """Close all connections."""
        for caller in list(self.callers.values()):
            self._flush(caller)
            self.drop(caller)
        self._set_accepting(True)
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._selector.close()

    def drop(self, caller: Peer) -> None:
        """Hang up on a caller."""
        if self.callers.pop(caller.socket, None) is None:
            return
        self._selector.unregister(caller.socket)
        caller.socket.close()
        self._on_gone(caller)

    def _add(self, listener: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)
        self._listeners[listener] = welcome
        self._selector.register(listener, selectors.EVENT_READ)

    def _set_accepting(self, are_open: bool) -> None:
        """Take callers from now on, or leave them waiting."""
        if are_open is self._is_accepting:
            return
        self._is_accepting = are_open
        for listener, welcome in self._listeners.items():
            if welcome != self._welcome:
                continue
            if are_open:
                self._selector.register(listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(listener)

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        set_up(connection)
        nonce = make_nonce()
        caller = Peer(connection, Conversation(self._token, nonce, Role.SERVER), time.monotonic(), bytearray(nonce))
        self.callers[connection] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        self._flush(caller)

    def _take(self, caller: Peer) -> None:
        try:
            data = caller.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(caller)
            return
        try:
            caller.conversation.add(data)
            while caller.socket in self.callers and (message := caller.conversation.take()) is not None:
                self._on_message(caller, message)
        except (Error, KeyError, TypeError, ValueError) as error:
            who = "a caller" if caller.is_known else "a caller without the token, turned away"
            self._hang_up(caller, f"{who}: {type(error).__name__}: {error}")

    def _flush(self, caller: Peer) -> None:
        if not caller.out or caller.socket not in self.callers:
            return
        try:
            sent = caller.socket.send(caller.out)
            del caller.out[:sent]
            caller.unread_s = time.monotonic() if caller.out else math.inf
        except BlockingIOError:
            caller.unread_s = min(caller.unread_s, time.monotonic())
            if len(caller.out) > _SEND_LIMIT_BYTES:
                self._give_up(caller, f"left {len(caller.out)} bytes unread")
        except OSError:
            # Found by reading, in the order in which lines broke: the first one names the cause.
            caller.out.clear()
            caller.unread_s = math.inf

    def _give_up(self, caller: Peer, why: str) -> None:
        caller.is_deaf = True
        self._hang_up(caller, f"a caller that {why}")

    def _hang_up(self, caller: Peer, why: str) -> None:
        if caller.socket not in self.callers:
            return
        self._log(f"hung up on {why}")
        self.drop(caller)
