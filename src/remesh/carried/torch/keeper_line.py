"""Control thread of Remesh in a program: it answers its rank's keeper, and sheds and grows groups on request.

    keeper      ask, shed, open, final   ──>
                                         <──   here, status, shed, final

It sleeps in a receive while the program works. At a cut it closes its connection, so that the image holds none, and
looks for the next notice. Nothing of torch is imported here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Final, Protocol

from remesh.carried.images.form.kinds import CHANNEL_PATH
from remesh.carried.rounds.status import Activity, Status
from remesh.carried.torch.gate import Gate
from remesh.carried.torch.notice import INTERFACE_VARIABLE, Notice, read_notice
from remesh.foundation.errors import Error
from remesh.foundation.threads import make_thread
from remesh.wire.messages import Line, Message
from remesh.wire.token import Token

_NOTICE_POLL_S: Final = 0.002
_GOODBYE_GRACE_S: Final = 5.0
"""How long a program that ends at once waits for its goodbye, while there is no cut."""


class Carried(Protocol):
    """The parts of a program that take part in a cut."""

    def describe(self, *, has_ended: bool = False) -> Status: ...
    def shed(self) -> str: ...
    def grow(self, prefix: str, address: tuple[str, int], ended: tuple[int, ...]) -> None: ...


def token_of(notice: Notice) -> Token:
    """The token that proves that this process belongs to the job."""
    return Token("", bytes.fromhex(notice.secret))


class ControlThread:
    """The program's end of the line to its keeper."""

    def __init__(self, gate: Gate, rank: int, place: Path = Path(CHANNEL_PATH)) -> None:
        """``place`` is the file in which the keeper leaves notices."""
        self._gate, self._rank, self._place = gate, rank, place
        self.carried: Carried | None = None
        """None until the program has made its first group."""
        self.notice = _next_notice(place, 0)
        self._line: Line | None = None
        self._turn = threading.Lock()
        """Held by the thread that sends for the program."""
        self._has_left = False
        """Whether goodbye was sent. The program then answers nothing more: its keeper does, once it has ended."""
        self._pid = os.getpid()
        self._thread = make_thread("control", self._run, daemon=True)

    def start(self) -> None:
        """Connect, and answer from now on."""
        self._use_interface()
        self._connect("")
        self._thread.start()

    def send_goodbye(self) -> None:
        """Send the keeper what the program, which is about to end, has sent and received: later cuts need it.

        This waits until a cut is over: the other ranks count on this one to grow groups with them.
        """
        while os.getpid() == self._pid:
            self._gate.wait_until_open()
            with self._turn:
                if not self._gate.is_closed:
                    self._has_left = True
                    self._say({"type": "final", "status": self._describe(has_ended=True).to_json()})
                    return

    def send_goodbye_aside(self) -> None:
        """Send goodbye in a thread, for a caller that may have interrupted this module's code, as signal handlers do.

        What that code holds it gives back only after the caller: so this waits a while, and as long as a cut takes.
        """
        speaker = make_thread("goodbye", self.send_goodbye, daemon=True)
        with contextlib.suppress(RuntimeError):  # Python is about to end, and starts no thread
            speaker.start()
            speaker.join(_GOODBYE_GRACE_S)
            while speaker.is_alive() and self._gate.is_closed:
                speaker.join(_GOODBYE_GRACE_S)

    def descriptors(self) -> list[int]:
        """The descriptor of the line to the keeper, while there is one."""
        return [] if self._line is None or self._line.fileno() < 0 else [self._line.fileno()]

    def _run(self) -> None:
        while True:
            self._obey_until_shed()
            self.notice = _next_notice(self._place, self.notice.number)
            problem = self._grow()
            self._connect(problem)
            if not problem:
                self._gate.open()

    def _connect(self, problem: str) -> None:
        token = token_of(self.notice)
        self._line = Line.connect([self.notice.keeper], token, "calling the keeper of this rank")
        self._say({"type": "here", "problem": problem})

    def _obey_until_shed(self) -> None:
        assert self._line is not None
        while (message := self._line.receive()) is not None:
            with self._turn:
                match message["type"]:
                    case "ask" if not self._has_left:
                        self._answer(message)
                    case "open":
                        self._gate.open()
                    case "shed":
                        problem = "" if self.carried is None else self.carried.shed()
                        self._say({"type": "shed", "problem": problem})
                        self._line.close()
                        return
        # The keeper is gone, and ends this process with it.
        threading.Event().wait()

    def _answer(self, message: Message) -> None:
        if message["step"] == "hold":
            self._gate.hold({str(key): int(count) for key, count in (message["targets"] or {}).items()})
        else:
            self._gate.close()
        self._say({"type": "status", "wave": message["wave"], "status": self._describe().to_json()})

    def _describe(self, *, has_ended: bool = False) -> Status:
        if self.carried is not None:
            return self.carried.describe(has_ended=has_ended)
        activity = Activity.FINISHED if has_ended else Activity.COMPUTING
        return Status(self._rank, activity, closed=self._gate.is_closed or has_ended)

    def _grow(self) -> str:
        notice = self.notice
        self._use_interface()
        try:
            if self.carried is not None:
                self.carried.grow(notice.growth, notice.store, notice.ended)
        except (Error, RuntimeError, OSError) as error:
            return f"growing its groups again: {error}"
        return ""

    def _use_interface(self) -> None:
        os.environ[INTERFACE_VARIABLE] = self.notice.interface

    def _say(self, message: Message) -> None:
        assert self._line is not None
        self._line.send(message)


def _next_notice(place: Path, after: int) -> Notice:
    while (found := read_notice(place, after)) is None:
        time.sleep(_NOTICE_POLL_S)
    return found
