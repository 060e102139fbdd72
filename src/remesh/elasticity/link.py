"""Connection of a worker to its agent, and its lifeline.

When it ends, the agent is gone, and the worker ends at once.

So the death of an agent never leaves orphans behind. The line is a Unix socket in a folder that only their user may
open, with the token of the link beside it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from remesh.elasticity.model.outcome import Category
from remesh.foundation.errors import ConfigError, FormatError, PeerError
from remesh.foundation.settings import SLOT, timeout_s
from remesh.foundation.threads import make_thread
from remesh.wire.messages import Line, Message
from remesh.wire.token import Token

ORPHANED = 70
"""Exit code of a worker whose agent is gone (EX_SOFTWARE of sysexits.h)."""
_CONNECT_TIMEOUT_S = timeout_s(120.0)
"""An agent that looks for another store accepts no connection meanwhile; one that is gone refuses at once."""


def token_path(link: Path) -> Path:
    """The path of the token of a link."""
    return link.with_name("token")


def connect_agent(link: str) -> Line:
    """A line to this worker's agent. ConfigError when no agent is there."""
    try:
        token = Token("", token_path(Path(link)).read_bytes())
        return Line.connect([link], token, "joining the job", connect_s=_CONNECT_TIMEOUT_S)
    except (OSError, PeerError) as error:
        raise ConfigError(
            f"joining the job: no agent answers at {link} ({error}); start the script with `remesh run`"
        ) from error


def refuse_job(line: Line, text: str) -> None:
    """Report to the agent that the script asks for what cannot be; return once the job is over."""
    slot = int(SLOT.read())
    line.send({"type": "failed", "slot": slot, "text": text, "category": Category.INPUT.value})
    with contextlib.suppress(OSError, FormatError):
        while (message := line.receive()) is not None and message["type"] != "exit":
            pass
    line.close()


def _leave_to_agent(_number: int, _frame: object) -> None:
    """A platform that takes a node away may signal all of its processes: the agent has its workers hand over first."""


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _leave_to_agent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class WorkerLink:
    """The worker's end. A thread reads; urgent messages go to ``on_urgent`` at once, the others to :meth:`next`."""

    def __init__(self, line: Line, on_urgent: Callable[[Message], bool]) -> None:
        self._line = line
        self._on_urgent = on_urgent
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._closing = False

    def start(self) -> None:
        """Begin to read, and leave SIGTERM to the agent, where the program has no handler of its own."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave_to_agent)
            os.register_at_fork(after_in_child=_end_by_sigterm)
        make_thread("link", self._read, daemon=True).start()

    def close(self) -> None:
        self._closing = True
        _end_by_sigterm()
        self._line.close()

    def send(self, message: Message) -> None:
        self._line.send(message)

    def next(self) -> Message:
        """Block until the agent sends a message that is not urgent. The agent bounds the wait: it ends or we end."""
        return self._inbox.get()

    def _read(self) -> None:
        with contextlib.suppress(OSError, FormatError):
            while (message := self._line.receive()) is not None:
                if not self._on_urgent(message):
                    self._inbox.put(message)
        if not self._closing:
            os._exit(ORPHANED)
