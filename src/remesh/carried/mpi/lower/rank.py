"""Loop of a rank's lower half, from its first message to its last, in the thread that owns MPI.

    serve the program ── ask ──> serve on or close, answer with a status ── image ──> write ── end ──> serve, or go

`RankLoop` joins three parts that know nothing of each other: the `MpiLowerHalf` that serves calls, the image engine,
and the coordinator's messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from remesh.carried.hosts.outputs import Output
from remesh.carried.hosts.shared_folder import SharedFolder
from remesh.carried.images import Upper
from remesh.carried.mpi.lower.half import MpiLowerHalf
from remesh.carried.rounds.leader_line import Control
from remesh.carried.rounds.status import Activity, Status, pairs
from remesh.foundation.errors import PeerError
from remesh.wire.messages import Message

if TYPE_CHECKING:
    from remesh.carried.mpi.lower.taking import ImageTaker

_SERVE_S = 0.05
"""Time to serve the program before a look at the rest of the world."""
_LOOK_S = 0.05
"""Time between looks at the program's output and health."""
_END_S = 5.0
"""Time for a program whose memory is gone to become one that has ended."""
_POLL_S = 0.001


class Ended(PeerError):
    """The job is over and this rank has to go at once, through no fault of its own."""


_NO_MPI: Final = (
    "the program ended without having started MPI, so each rank ran by itself: see that it uses MPI, and that its "
    "libmpi is a shared library (`ldd PROGRAM`)"
)

_MEMORY_LOST: Final = (
    "the program ended while another rank was to receive a message from its memory, or used a window there: let it "
    "complete its sends (MPI_Wait) and free its windows, and call MPI_Finalize, before it ends"
)


class RankLoop:
    """The loop of one rank's stay; `run` returns when the job ends on this rank."""

    def __init__(
        self, room: SharedFolder, half: MpiLowerHalf, upper: Upper | None, control: Control, outputs: Sequence[Output]
    ) -> None:
        """``upper`` is None for a program that had ended before the checkpoint that the job was restarted from."""
        self._room = room
        self._rank = room.rank
        self._half = half
        self._upper = upper
        self._control = control
        self._ended: int | None = None if upper is not None else 0
        self._closed = False
        self._is_memory_lost = False
        self._taker: ImageTaker | None = None
        self._next_look_s = 0.0
        self._outputs = outputs

    def run(self) -> None:
        """Serve until told to go; raises `Ended` when the job has failed or its coordinator is gone."""
        if self._upper is None:
            self._tell_end(0)
        while True:
            try:
                message = self._serve()
                if message is not None and not self._obey(message):
                    return
            except ProcessLookupError:
                self._tell_memory_lost()
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_S
                self._look()

    def _serve(self) -> Message | None:
        """Serve for a while; returns what the coordinator says."""
        if self._is_memory_lost:
            return self._control.take(_SERVE_S)
        if self._closed:
            self._half.drain_progress()
            return self._control.take(0.001)
        self._half.serve_once(_SERVE_S)
        return self._control.take()

    def _tell_memory_lost(self) -> None:
        """Tell that the program has ended, whose memory is still wanted; the coordinator ends the job for it."""
        self._is_memory_lost = True
        end_s = time.monotonic() + _END_S
        while not self._has_ended() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        if not self._ended:
            self._control.send({"type": "failed", "cause": _MEMORY_LOST, "code": 1})

    def _look(self) -> None:
        for output in self._outputs:
            output.copy()
        if (code := self._half.abort_code) is not None:
            self._control.send({"type": "failed", "cause": f"the program called Abort with {code}", "code": code or 1})
        if self._upper is None or self._ended is not None or (code := self._upper.poll()) is None:
            return
        self._ended = code
        self._half.forget_program()
        for output in self._outputs:
            output.copy()
        if code == 0 and not self._half.has_been_called:
            self._control.send({"type": "failed", "cause": _NO_MPI, "code": 1})
        self._tell_end(code)

    def _tell_end(self, code: int) -> None:
        self._control.send({"type": "ended", "code": code, "omitted": "" if self._half.finished else "MPI_Finalize"})

    def _obey(self, message: Message) -> bool:
        """Do what the coordinator says; returns False when it is time to go."""
        match message["type"]:
            case "ask":
                self._answer(message)
            case "image":
                self._control.send({"type": "imaged", **self._images().take(message)})
            case "end" if message["ending"] == "stopped":
                return False
            case "end":
                self._resume()
            case "leave":
                return False
            case "abort" | "lost":
                raise Ended(message.get("cause", "the coordinator of the job is gone"))
        return True

    # --- a round ---

    def _answer(self, message: Message) -> None:
        is_first = int(message["wave"]) == 1
        # Nothing that others see can end too early here: see collectives.py. So there is nothing to hold.
        if message["step"] == "close" and not self._closed:
            self._closed = True
            self._half.close()
        if self._closed:
            self._half.drain_progress()
        status = describe_half(self._rank, self._half, is_closed=self._closed, has_ended=self._ended is not None)
        answer = status.to_json()
        if is_first:
            answer["refusals"] = self._images().refusals()
        self._control.send({"type": "status", "wave": message["wave"], "status": answer})

    def _has_ended(self) -> bool:
        """Whether the program has ended, looked at now."""
        self._look()
        return self._ended is not None

    def _images(self) -> ImageTaker:
        if self._taker is None:
            # The code that takes images is as large as all else that a rank loads, and most runs begin without it.
            from remesh.carried.mpi.lower.taking import ImageTaker  # noqa: PLC0415

            self._taker = ImageTaker(self._room, self._half, self._upper, self._outputs, self._has_ended)
        return self._taker

    def _thaw(self) -> None:
        if self._taker is not None:
            self._taker.thaw()

    def _resume(self) -> None:
        self._thaw()
        if self._closed:
            self._half.open()
            self._closed = False

    # --- the end ---

    def leave(self) -> None:
        """End the program if it still runs, and give MPI back what is its own. All ranks do this together."""
        if self._upper is not None and self._ended is None:
            self._upper.kill()
        self._thaw()
        for output in self._outputs:
            output.copy()
        self._half.release()
        self._control.send({"type": "left"})


def describe_half(rank: int, half: MpiLowerHalf, *, is_closed: bool, has_ended: bool) -> Status:
    """Describe a lower half in the words of the protocol."""
    counters = half.counters()
    return Status(
        rank,
        Activity.FINISHED if has_ended else half.position(),
        sent=pairs(counters.sent),
        received=pairs(counters.received),
        quiet=half.quiet() if is_closed else False,
        in_file=half.in_file,
        closed=is_closed,
        collectives=tuple(sorted(counters.collectives.items(), key=lambda item: item[0])),
    )
