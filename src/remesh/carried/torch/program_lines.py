"""Server threads of a rank's keeper: one for each connection that the rank's program opens."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from remesh.foundation.errors import Error
from remesh.foundation.settings import timeout_s
from remesh.foundation.threads import make_thread
from remesh.wire.messages import Line, Message
from remesh.wire.token import Token

_LOOPBACK: Final = "127.0.0.1"
_PROOF_TIMEOUT_S: Final = timeout_s(20.0)


class Callers:
    """Those who call one address: every message of theirs is handed on, with the line that it came by."""

    def __init__(self, token: Token, hand_on: Callable[[Message, Line], None]) -> None:
        """``hand_on`` is called from the threads that hear."""
        self._token, self._hand_on = token, hand_on
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._listener.setblocking(False)
        self._taking = threading.Lock()
        """Held while a caller is taken and counted."""
        self._num_callers = 0

    @property
    def address(self) -> tuple[str, int]:
        """The place to call."""
        host, port = self._listener.getsockname()
        return host, port

    def start(self) -> None:
        """Take them from now on."""
        make_thread("keeper-callers", self._take_callers, daemon=True).start()

    def is_silent(self) -> bool:
        """Whether all that callers sent has been handed on: no line is open, and no caller waits for one."""
        with self._taking:
            return self._num_callers == 0 and not self._is_called(0)

    def close(self) -> None:
        """Accept no other caller."""
        self._listener.close()

    def _is_called(self, patience_s: float | None) -> bool:
        return bool(select.select([self._listener], [], [], patience_s)[0])

    def _take_callers(self) -> None:
        while True:
            try:
                self._is_called(None)
                with self._taking:
                    connection, _ = self._listener.accept()
                    self._num_callers += 1
            except BlockingIOError:  # the caller has gone again
                continue
            except (OSError, ValueError):  # closed
                return
            make_thread("keeper-line", self._hear, connection, daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with contextlib.suppress(Error, OSError), connection:
            line = Line.answer(connection, self._token, patience_s=_PROOF_TIMEOUT_S)
            while (message := line.receive(float(threading.TIMEOUT_MAX))) is not None:
                self._hand_on(message, line)
        with self._taking:
            self._num_callers -= 1
