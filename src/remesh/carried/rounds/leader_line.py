"""Coordinator connection of a lower half: a thread that reads it, and wakes the thread that serves.

The thread calls no communication library and changes nothing but its queue.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from remesh.foundation.errors import Error
from remesh.foundation.threads import make_thread
from remesh.wire.messages import Line, Message

LOST = {"type": "lost"}
"""The message that is received once the coordinator is gone."""


class Control:
    """The line of one rank to its coordinator; `start` begins to read."""

    def __init__(self, line: Line, on_message: Callable[[], None]) -> None:
        """``on_message`` is called by the reading thread for each message that has arrived."""
        self._line = line
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._on_message = on_message
        self._thread = make_thread("control", self._read, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message to the coordinator; the reader finds out if the line is broken."""
        try:
            self._line.send(message)
        except OSError:
            self._messages.put(LOST)

    def take(self, timeout_s: float = 0.0) -> Message | None:
        """Take the next message, if there is one within the time."""
        try:
            return self._messages.get(timeout=timeout_s) if timeout_s else self._messages.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Close the line."""
        self._line.close()

    def _read(self) -> None:
        try:
            while (message := self._line.receive()) is not None:
                self._messages.put(message)
                self._on_message()
        except (OSError, Error):
            pass
        self._messages.put(LOST)
        self._on_message()
