"""The other end of `remesh.comm.messages.Line`: takes callers, has each prove that it knows the token, hears them.

One thread, one `Server.poll` at a time, nothing that blocks. Who says what no caller may say, does not prove itself in
time, or does not read what it is told, is hung up on; what that means is for whoever leads the job.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from remesh.comm.messages import PROOF_BYTES, FrameReader, Message, is_proof, make_nonce, pack_frame, set_up
from remesh.errors import FormatError

_PROOF_LIMIT_S = 20.0
"""For a caller to show that it knows the token."""
_SEND_LIMIT_BYTES = 64 << 20
"""A caller that lets this much pile up does not read any more."""
_READ_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class Caller:
    """A connection."""

    socket: socket.socket
    nonce: bytes
    came_s: float
    proof: bytearray = field(default_factory=bytearray)
    is_known: bool = False
    """It has shown that it knows the token."""
    reader: FrameReader = field(default_factory=FrameReader)
    out: bytearray = field(default_factory=bytearray)


class Server:
    """Connections to callers; `poll` moves them on."""

    def __init__(
        self,
        token: bytes,
        on_message: Callable[[Caller, Message], None],
        on_gone: Callable[[Caller], None],
        log: Callable[[str], None],
    ) -> None:
        """``on_message`` is called for what known callers say, ``on_gone`` once for each whose connection ends."""
        self._token = token
        self._on_message, self._on_gone, self._log = on_message, on_gone, log
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self.callers: dict[socket.socket, Caller] = {}

    def listen(self, listener: socket.socket) -> None:
        """Take connections from this listening socket too."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, wait_s: float) -> None:
        """Hear who speaks, and send what still waits; wait for more at most ``wait_s``."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif (caller := self.callers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._take(caller)
        too_early_s = time.monotonic() - _PROOF_LIMIT_S
        for caller in list(self.callers.values()):
            if caller.is_known or caller.came_s > too_early_s:
                self._flush(caller)
            else:
                self._log(f"somebody who did not show the token within {_PROOF_LIMIT_S:g} s was hung up on")
                self._drop(caller)

    def tell(self, caller: Caller, message: Message) -> None:
        """Say something to a caller; nothing happens if it has gone."""
        caller.out += pack_frame(message)
        self._flush(caller)

    def close(self) -> None:
        """Hang up on everybody."""
        for caller in list(self.callers.values()):
            self._flush(caller)
            self._drop(caller)
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            set_up(connection)
            caller = Caller(connection, make_nonce(), time.monotonic())
            caller.out += caller.nonce
            self.callers[connection] = caller
            self._selector.register(connection, selectors.EVENT_READ)
            self._flush(caller)

    def _take(self, caller: Caller) -> None:
        try:
            data = caller.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(caller)
            return
        if not caller.is_known:
            caller.proof += data
            if len(caller.proof) < PROOF_BYTES:
                return
            proof, data = bytes(caller.proof[:PROOF_BYTES]), bytes(caller.proof[PROOF_BYTES:])
            if not is_proof(self._token, caller.nonce, proof):
                self._log("somebody who does not know the token was turned away")
                self._drop(caller)
                return
            caller.is_known = True
        try:
            for message in caller.reader.feed(data):
                self._on_message(caller, message)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            self._log(f"a caller was hung up on: {error!r}")
            self._drop(caller)

    def _flush(self, caller: Caller) -> None:
        if not caller.out or caller.socket not in self.callers:
            return
        try:
            sent = caller.socket.send(caller.out)
            del caller.out[:sent]
        except BlockingIOError:
            if len(caller.out) > _SEND_LIMIT_BYTES:
                self._drop(caller)
        except OSError:
            # Found by reading, in the order in which lines broke: the first one names the cause.
            caller.out.clear()

    def _drop(self, caller: Caller) -> None:
        if self.callers.pop(caller.socket, None) is None:
            return
        self._selector.unregister(caller.socket)
        caller.socket.close()
        self._on_gone(caller)
