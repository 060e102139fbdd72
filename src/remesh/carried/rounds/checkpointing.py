"""Checkpoint rounds of a job, one after the other, while its leader leads.

What a round means is decided in `remesh.carried.rounds.round_machine`; here its instructions become messages to the
ranks, folders and manifests. A round that failed for a transient reason is begun anew; old checkpoints are removed by a
thread.

    asked for, or due  ──>  begun  ──>  End: committed, given up  ──>  answered, or tried again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remesh.carried.rounds.clock import split_targets
from remesh.carried.rounds.job_folder import JobFolder, rank_name
from remesh.carried.rounds.journal import Journal
from remesh.carried.rounds.ranks import Ranks
from remesh.carried.rounds.round_machine import Ask, Commit, End, Ending, Instruction, Obstacle, Round, TakeImage
from remesh.carried.rounds.shared_files import agree_on_files
from remesh.carried.rounds.status import Status
from remesh.foundation.errors import Error
from remesh.foundation.thread_pool import PooledExecutor
from remesh.wire.messages import Message

_RETRY_AFTER_S = {Obstacle.NO_CUT: (1.0,) * 4, Obstacle.REFUSED: (0.1, 0.2, 0.4, 0.8)}
"""The waits after the first, second, ... attempt of a request that met an obstacle which may pass.

A refusal stops no rank, and most pass in a moment: a child that is about to run a program, a file an import has open.
"""
_REMOVAL_POLL_S = 0.005
"""Time between looks at a removal that a round waits for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a job's checkpoints."""

    every_s: float | None = None
    """Time between periodic checkpoints; None for none."""
    keep: int = 2
    """Number of checkpoints that stay, at least 1."""
    round_limit_s: float = 60.0
    start_limit_s: float = 300.0
    """Time limit for all ranks to come up, images read and all."""
    incremental: bool = False
    compress: bool = False


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A checkpoint that was asked for, or is due."""

    not_before_s: float = 0.0
    stop: bool = False
    attempt: int = 1
    has_made_room: bool = False
    """Whether old checkpoints were removed for want of room."""


@dataclass(slots=True)
class _Attempt:
    """The round that is under way and what belongs to it."""

    round: Round
    number: int
    part: Path
    began_s: float
    attempts: int
    """Number of rounds of the same request, this one included."""
    images: dict[int, Message] = field(default_factory=dict)
    cut_s: float = 0.0
    """The time when the images were begun."""
    imaged_s: float = 0.0
    """The time when the last image was there."""

    def seconds(self, now_s: float) -> dict[str, float]:
        """What its phases took."""
        cut_s, imaged_s = self.cut_s or now_s, self.imaged_s or now_s
        return {"cut": cut_s - self.began_s, "images": imaged_s - cut_s, "total": now_s - self.began_s}

    def describe(self) -> dict[str, Any]:
        """Describe how large it is, and at what the ranks were caught."""
        reports = [message["report"] for message in self.images.values()]
        caught = {
            name: sum(int(report["caught"].get(name, 0)) for report in reports)
            for name in sorted({name for report in reports for name in report["caught"]})
        }
        return {
            "number": self.number,
            "folder": str(self.part.with_suffix("")),
            "num_bytes": sum(int(report["num_bytes"]) for report in reports),
            "caught": caught,
        }


class Checkpointing:
    """The checkpoint rounds of one run of a job."""

    def __init__(
        self,
        folder: JobFolder,
        ranks: Ranks,
        settings: Settings,
        journal: Journal,
        add_to_checkpoint: Callable[[Path], Mapping[str, Any]],
        on_answer: Callable[[End, Message | None], None],
    ) -> None:
        """``on_answer`` gets the answer to clients that wait for a checkpoint; None if a later round answers all.

        ``add_to_checkpoint`` is that of `Coordinator`.
        """
        self._folder, self._ranks, self._settings, self._journal = folder, ranks, settings, journal
        self._add_to_checkpoint, self._on_answer = add_to_checkpoint, on_answer
        self._attempt: _Attempt | None = None
        self._num_rounds = 0
        """Number of rounds begun in this run of the job, this one included."""
        self._writing: set[int] = set()
        """Ranks that were asked to write their image and have not answered; also when the round has been given up."""
        self._due: list[tuple[float, Mapping[int, Message]]] = []
        """Messages to ranks that wait for their time."""
        self._wanted: _Wanted | None = None
        self._next_periodic_s: float | None = None
        self._remover = PooledExecutor(1, "remover")
        self._removal: Future[list[int]] | None = None
        """The removal of old checkpoints, while it is under way."""
        self._is_hurried = threading.Event()
        """Set where the removal that is under way breaks off at its next file."""
        self.last: Message | None = None
        """What was answered after the last round that made a checkpoint."""

    # --- calls of its leader ---

    def request(self, *, stop: bool) -> None:
        """Take a checkpoint as soon as can be."""
        self._wanted = _Wanted(stop=stop or self._is_to_stop())

    def begin_period(self) -> None:
        """Count the time to the next periodic checkpoint from now on."""
        if self._settings.every_s is not None:
            self._next_periodic_s = time.monotonic() + self._settings.every_s

    def patience_s(self, longest_s: float, now_s: float) -> float:
        """How long the leader may wait for messages before something here is due."""
        if self._removal is not None and self._wanted is not None:
            longest_s = min(longest_s, _REMOVAL_POLL_S)
        return max(min([longest_s, *(moment - now_s for moment, _ in self._due)]), 0.0)

    def do_what_is_due(self, now_s: float, *, may_begin: bool) -> None:
        """Send what has waited for its time, give up what took too long, begin a round if the job ``may_begin`` one."""
        due = [told for moment, told in self._due if moment <= now_s]
        self._due = [(moment, told) for moment, told in self._due if moment > now_s]
        for told in due:
            self._ranks.send_each(told)
        if self._attempt is not None:
            self._advance(*self._attempt.round.on_time(now_s))
        if self._next_periodic_s is not None and now_s >= self._next_periodic_s and self._wanted is None:
            self._wanted = _Wanted()
            self._next_periodic_s = None
        self._note_removal()
        # A round has the room that a removal makes, and both need the disk: it waits for one that is under way. But a
        # client that stops a job has little time, and such a round waits only for room.
        if self._removal is not None and self._is_to_stop() and not self._find_lack_of_room():
            self._is_hurried.set()
        is_busy = self._attempt is not None or self._writing or self._removal is not None
        if self._wanted is not None and now_s >= self._wanted.not_before_s and may_begin and not is_busy:
            self._begin(now_s)

    @property
    def is_under_way(self) -> bool:
        """Whether a round is."""
        return self._attempt is not None

    def describe(self) -> str | None:
        """Describe where the round is, for people; None between rounds."""
        return None if self._attempt is None else f"{self._attempt.round.phase.value}: {self._attempt.round.reason}"

    def break_off_removal(self) -> None:
        """Let old checkpoints that are not removed yet stay until a later removal, which the next run begins."""
        self._is_hurried.set()

    def close(self) -> None:
        """Wait until old checkpoints are removed, or their removal has been broken off."""
        self._remover.shutdown()
        self._note_removal()

    # --- messages of ranks ---

    def on_status(self, message: Message) -> None:
        """Take a rank's answer to a wave."""
        if self._attempt is not None:
            status = Status.from_json(message["status"])
            self._advance(*self._attempt.round.on_status(status, int(message["wave"]), time.monotonic()))

    def on_imaged(self, rank: int, message: Message) -> None:
        """Note that a rank has written its image, or could not."""
        self._writing.discard(rank)
        if self._attempt is not None:
            self._attempt.images[rank] = message
            problem, refused = str(message["problem"]), bool(message.get("refused"))
            self._advance(*self._attempt.round.on_imaged(rank, problem, refused=refused))
        elif not self._writing:
            self._clear_away()

    def on_lost(self, rank: int, why: str) -> None:
        """Note that a rank is gone."""
        if self._attempt is not None:
            self._advance(*self._attempt.round.on_lost(rank, why))

    # --- a round ---

    def _is_to_stop(self) -> bool:
        return self._wanted is not None and self._wanted.stop

    def _begin(self, now_s: float) -> None:
        assert self._wanted is not None
        request, self._wanted = self._wanted, None
        # A removal that was broken off, here or in an earlier run, has left what may be needed: room.
        may_clear = not request.has_made_room
        if may_clear and not request.stop and self._folder.has_remains():
            self._make_room_for(request)
            return
        try:
            number, part = self._folder.begin_checkpoint()
        except OSError as error:
            self._answer(End(Ending.GIVEN_UP, f"no folder could be made in {self._folder.images}: {error}"), {})
            return
        if lack := self._find_lack_of_room():
            part.rmdir()
            if may_clear:
                self._make_room_for(request)
            else:
                self._answer(End(Ending.GIVEN_UP, lack), {})
            return
        self._num_rounds += 1
        state = Round(self._ranks.num_ranks, request.stop, limit_s=self._settings.round_limit_s)
        self._attempt = _Attempt(state, number, part, now_s, request.attempt)
        self._journal.note(f"checkpoint {number}: begun")
        self._advance(*state.begin(now_s))

    def _make_room_for(self, request: _Wanted) -> None:
        """Begin a removal that comes before the round of this request."""
        self._wanted = replace(request, has_made_room=True)
        self._clear_away()

    def _find_lack_of_room(self) -> str:
        # The length of an increment is not known before.
        return "" if self._settings.incremental else self._folder.find_lack_of_room()

    def _advance(self, state: Round, instructions: tuple[Instruction, ...]) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.round = state
        for instruction in instructions:
            match instruction:
                case Ask():
                    self._ask(instruction)
                case TakeImage():
                    attempt.cut_s = time.monotonic()
                    self._writing = self._ranks.present()
                    self._ranks.send_all({"type": "image", **self._image_request(attempt)})
                case Commit():
                    attempt.imaged_s = time.monotonic()
                    self._advance(*attempt.round.on_committed(self._commit(attempt)))
                case End():
                    self._on_end(attempt, instruction)

    def _ask(self, ask: Ask) -> None:
        assert self._attempt is not None
        message = {"type": "ask", "wave": ask.wave, "step": ask.step.value, "targets": None}
        told = dict.fromkeys(self._ranks.present(), message)
        if ask.targets is not None:
            assert self._attempt.round.before is not None  # targets follow from a wave
            own = split_targets(dict(ask.targets), self._attempt.round.before)
            told = {rank: {**message, "targets": targets} for rank, targets in enumerate(own)}
        if ask.after_s:
            self._due.append((time.monotonic() + ask.after_s, told))
        else:
            self._ranks.send_each(told)

    def _image_request(self, attempt: _Attempt) -> Message:
        previous = self._base_of_next() if self._settings.incremental else None
        return {
            "folder": str(attempt.part),
            "stop": attempt.round.stop,
            "previous": None if previous is None else str(self._folder.images / f"{previous:06d}"),
            "track": self._settings.incremental,
            "compress": self._settings.compress,
        }

    def _base_of_next(self) -> int | None:
        """The checkpoint that the next one may build upon: one of this run, since tracking begins anew with each."""
        return None if self.last is None else int(self.last["number"])

    def _commit(self, attempt: _Attempt) -> str:
        reports = agree_on_files({rank: message["report"] for rank, message in sorted(attempt.images.items())})
        bases = {each for report in reports.values() for each in report.get("builds_upon", ())}
        try:
            manifest = {
                **self._add_to_checkpoint(attempt.part),
                "version": 1,
                "job": self._folder.name,
                "number": attempt.number,
                "num_ranks": self._ranks.num_ranks,
                "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **self._ranks.made_by(),
                "builds_upon": sorted(bases),
                "ranks": {rank_name(rank): report for rank, report in reports.items()},
            }
            self._folder.commit_checkpoint(attempt.part, manifest, self._journal.warn)
        except (Error, OSError) as error:
            return str(error)
        return ""

    # --- after it ---

    def _on_end(self, attempt: _Attempt, end: End) -> None:
        self._attempt = None
        self._due.clear()
        told = {
            "ending": end.ending.value,
            "reason": end.reason,
            "round": self._num_rounds,
            "ended": sorted(self._ranks.ended),
        }
        self._ranks.send_all({"type": "end", **told})
        if end.ending in (Ending.GIVEN_UP, Ending.LOST):
            self._on_failed(attempt, end, time.monotonic())
        else:
            answer = {**attempt.describe(), "seconds": attempt.seconds(time.monotonic()), "attempts": attempt.attempts}
            self._journal.note(f"checkpoint {attempt.number}: committed: {answer}")
            self._answer(end, answer)
            self._clear_away()

    def _on_failed(self, attempt: _Attempt, end: End, now_s: float) -> None:
        """Plan another round for the same request, or answer."""
        # A file that is written while its folder is removed stays behind: the last rank that writes clears it away.
        if not self._writing or end.ending is Ending.LOST:
            self._clear_away()
        self._journal.note(f"checkpoint {attempt.number}: {end.ending.value}: {end.reason}")
        pauses_s = () if end.obstacle is None else _RETRY_AFTER_S.get(end.obstacle, ())
        if attempt.attempts <= len(pauses_s):
            # Perhaps one to stop was asked for meanwhile.
            stop, not_before_s = attempt.round.stop or self._is_to_stop(), now_s + pauses_s[attempt.attempts - 1]
            self._wanted = _Wanted(not_before_s, stop, attempt.attempts + 1)
            return
        if attempt.attempts > 1:
            end = replace(end, reason=f"{end.reason} (the last of {attempt.attempts} attempts)")
        self._answer(end, {"seconds": attempt.seconds(now_s), "attempts": attempt.attempts})

    def _answer(self, end: End, more: Message) -> None:
        """Answer all clients that wait for a checkpoint.

        If another was asked for while this one was under way, perhaps to stop, the next one is the answer to all.
        """
        message = {"type": "checkpointed", "ending": end.ending.value, "reason": end.reason, **more}
        if more.get("number"):
            self.last = message
        else:
            self._journal.warn(f"no checkpoint was taken: {end.reason}")
        self.begin_period()
        if end.ending is Ending.STOPPED:
            self._wanted = None
        self._on_answer(end, message if self._wanted is None else None)

    def _clear_away(self) -> None:
        """Remove old checkpoints in a thread once the ranks run again: it takes time, and hurts nothing if it fails.

        No round is under way meanwhile, so all that the next one may build upon is known, and kept.
        """
        self._is_hurried.clear()
        self._removal = self._remover.submit(self._folder.keep_last, self._settings.keep, self._is_hurried.is_set)

    def _note_removal(self) -> None:
        if self._removal is None or not self._removal.done():
            return
        removal, self._removal = self._removal, None
        try:
            for number in removal.result():
                self._journal.note(f"checkpoint {number}: removed, {self._settings.keep} are kept")
            if self._is_hurried.is_set():
                self._journal.note("the removal of old checkpoints was broken off; a later one removes what is left")
        except (Error, OSError) as error:
            self._journal.warn(f"old checkpoints could not be removed: {error}")
