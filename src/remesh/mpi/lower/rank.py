"""What does the lower half of a rank do, from its first message to its last? One loop, in the thread that owns MPI.

    serve the program ── ask ──> serve on or close, answer with a status ── image ──> write ── end ──> serve, or go

`RankLoop` joins three parts that know nothing of each other: the `MpiLowerHalf` that serves calls, the image engine,
and the coordinator's messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from remesh.comm.messages import Message
from remesh.errors import Error, FormatError, PeerError, StorageError
from remesh.files import flush, write_new
from remesh.images import Frozen, NotImageable, Upper, check_imageable, freeze
from remesh.mpi.host_room import HostRoom
from remesh.mpi.lower.half import MpiLowerHalf
from remesh.mpi.lower.shared_memory import SharedCut, begin_cut, shared_files
from remesh.ranks.imaging import dump_into
from remesh.ranks.outputs import Output
from remesh.rounds.control import Control
from remesh.rounds.job_folder import rank_name
from remesh.rounds.status import Activity, Status, pairs

STATE = "lower.state"
"""File with the state of the lower half."""
_SERVE_S = 0.05
"""How long to wait for the program before a look at the rest of the world."""
_LOOK_S = 0.05
"""Between looks at the program's output and health."""


class Ended(PeerError):
    """The job is over and this rank has to go at once, through no fault of its own."""


_NO_MPI: Final = (
    "the program ended without having started MPI, so each rank ran by itself: see that it uses MPI, and that its "
    "libmpi is a shared library (`ldd PROGRAM`)"
)


class RankLoop:
    """One rank's stay; `run` returns when the job ends on this rank."""

    def __init__(
        self, room: HostRoom, half: MpiLowerHalf, upper: Upper | None, control: Control, outputs: Sequence[Output]
    ) -> None:
        """``upper`` is None for a program that had ended before the checkpoint that the job was restarted from."""
        self._room = room
        self._rank = room.rank
        self._half = half
        self._upper = upper
        self._control = control
        self._ended: int | None = None if upper is not None else 0
        self._closed = False
        self._frozen: Frozen | None = None
        self._writer = ThreadPoolExecutor(1, "remesh-state")
        self._next_look_s = 0.0
        self._outputs = outputs

    def run(self) -> None:
        """Serve until told to go; raises `Ended` when the job has failed or its coordinator is gone."""
        if self._upper is None:
            self._control.send({"type": "ended", "code": 0})
        while True:
            if self._closed:
                self._half.drain_progress()
                message = self._control.take(0.001)
            else:
                self._half.serve_once(_SERVE_S)
                message = self._control.take()
            if message is not None and not self._obey(message):
                return
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_S
                self._look()

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
        self._control.send({"type": "ended", "code": code})

    def _obey(self, message: Message) -> bool:
        """Do what the coordinator says; False when it is time to go."""
        match message["type"]:
            case "ask":
                self._answer(message)
            case "image":
                self._control.send({"type": "imaged", **self._take_image(message)})
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
            answer["refusals"] = self._refusals()
        self._control.send({"type": "status", "wave": message["wave"], "status": answer})

    def _refusals(self) -> list[str]:
        if self._upper is None or self._has_ended():
            return []
        try:
            return [str(refusal) for refusal in check_imageable(self._upper.pid)]
        except (Error, OSError) as error:
            # A program may end at any moment, this one included, and so may its threads and children.
            return [] if self._has_ended() else [f"what stands against an image could not be seen: {error}"]

    def _has_ended(self) -> bool:
        """Whether the program has ended, looked at now."""
        self._look()
        return self._ended is not None

    def _freeze(self) -> None:
        """Stop the program, unless it has ended."""
        if self._upper is None or self._has_ended():
            return
        try:
            self._frozen = freeze(self._upper.pid)
        except (Error, OSError):
            if not self._has_ended():
                raise

    def _take_image(self, request: Message) -> Message:
        folder = Path(request["folder"]) / rank_name(self._rank)
        report: dict[str, Any] = {"num_bytes": 0, "seconds": {}, "caught": {}}
        cut: SharedCut | None = None
        try:
            cut = begin_cut(self._room, folder.parent)
            folder.mkdir(mode=0o700)
            self._freeze()
            if cut is not None:
                cut.mark()
            for output in self._outputs:
                output.copy()
            report["outputs"] = [output.copied for output in self._outputs]
            state = self._half.state_bytes()
            report["lower_sha256"] = hashlib.sha256(state).hexdigest()
            report["num_bytes"] = len(state)
            report["has_image"] = self._frozen is not None
            report["caught"] = self._caught()
            written = self._writer.submit(_write_durable, folder / STATE, state)
            copied = self._writer.submit(cut.copy) if cut is not None and cut.is_first else None
            try:
                if self._frozen is not None:
                    self._dump(folder, request, report)
            finally:
                wait([written])
            written.result()
            if copied is not None:
                report["shared"] = copied.result()
            elif cut is not None:
                cut.wait()
            report["num_bytes"] += sum(int(each["num_bytes"]) for each in report.get("shared", {}).values())
            flush(folder)  # the names of both; the coordinator sees to that of the folder
        except (Error, OSError) as error:
            if cut is not None:
                cut.give_up(str(error))
            self._thaw()
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
            return {"problem": str(error), "refused": isinstance(error, NotImageable), "report": report}
        if not request["stop"]:
            self._thaw()
        return {"problem": "", "report": report}

    def _dump(self, folder: Path, request: Message, report: dict[str, Any]) -> None:
        assert self._frozen is not None
        if shares := shared_files(self._frozen.root.areas):
            report["shares"] = shares
        made = dump_into(self._frozen, folder, request)
        report["num_bytes"] += made.pop("num_bytes")
        report.update(made)

    def _caught(self) -> dict[str, int]:
        """What this cut went through the middle of: for people, and for the proof that hard cases were met."""
        return {f"ranks {self._half.position().value}": 1, **self._half.caught()}

    def _thaw(self) -> None:
        if self._frozen is not None:
            self._frozen.thaw()
            self._frozen = None

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
    """A lower half in the words of the protocol."""
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


def read_state(folder: Path, report: Mapping[str, Any]) -> bytes:
    """The saved state of a lower half, checked against the manifest."""
    try:
        data = (folder / STATE).read_bytes()
    except OSError as error:
        raise StorageError(f"reading {folder / STATE}: {error.strerror}; choose another checkpoint") from error
    if hashlib.sha256(data).hexdigest() != report.get("lower_sha256"):
        raise FormatError(
            "bad-state", f"reading {folder / STATE}: its digest does not match; choose another checkpoint"
        )
    return data


def _write_durable(path: Path, data: bytes) -> None:
    try:
        write_new(path, data)
    except OSError as error:
        raise StorageError(f"writing {path}: {error.strerror}; check its free space and permissions") from error
