"""Who leads a job? One process: it hears all ranks, takes them through checkpoint rounds, and answers its user.

One thread, one `step` at a time: callers that speak, rounds that are due, nothing that blocks; another removes what is
not needed any more. What a round means is decided in `remesh.rounds.machine`; here its instructions become messages,
folders and lines in the log.

    rank      hello, ready, status, imaged, ended, failed, left    <->    ask, image, end, leave, abort
    client    checkpoint, look                               <->    checkpointed, state
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remesh.comm.messages import Message
from remesh.comm.server import Peer, Server
from remesh.errors import Error
from remesh.exit_codes import ExitCode
from remesh.rounds.clock import split_targets
from remesh.rounds.job_folder import JobFolder, rank_name
from remesh.rounds.machine import Ask, Commit, End, Ending, Instruction, Obstacle, Round, TakeImage
from remesh.rounds.status import Status

_RETRY_AFTER_S = {Obstacle.NO_CUT: (1.0,) * 4, Obstacle.REFUSED: (0.1, 0.2, 0.4, 0.8)}
"""The waits after the first, second, ... attempt of a request that met an obstacle which may pass.

A refusal stops nobody, and most are of a moment: a child that is about to run a program, a file an import has open.
"""


_REMOVAL_LOOK_S = 0.005
"""Time between looks at a removal that a round waits for."""
_ALONE_S = 60.0
"""Time for all ranks to end once one has ended without a word to the others, who may wait for it for ever.

Launchers of MPI end the others at once, or, where none of them waits, let all end so; nobody knows who will wait.
"""


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
class JobOutcome:
    """The outcome of a job's stay on its ranks."""

    state: str
    """``finished``, ``stopped`` or ``failed``."""
    cause: str
    exit_code: int


@dataclass(slots=True)
class _Attempt:
    """The round that is under way and what belongs to it."""

    round: Round
    number: int
    part: Path
    began_s: float
    images: dict[int, Message] = field(default_factory=dict)
    cut_s: float = 0.0
    """The time when the images were begun."""
    imaged_s: float = 0.0
    """The time when the last image was there."""
    attempts: int = 1
    """Number of rounds of the same request, this one included."""


class Coordinator:
    """The leader of one stay of a job; call `step` until ``outcome`` is set."""

    def __init__(
        self,
        folder: JobFolder,
        num_ranks: int,
        settings: Settings,
        say: Callable[[str], None],
        add_to_checkpoint: Callable[[Path], Mapping[str, Any]] = lambda _: {},
    ) -> None:
        """``say`` takes lines for the user.

        ``add_to_checkpoint`` writes what the leader itself has into the folder of a checkpoint, while all ranks stand
        still, and returns what the manifest says of it.
        """
        self._folder = folder
        self._num_ranks = num_ranks
        self._settings = settings
        self._say = say
        self._add_to_checkpoint = add_to_checkpoint
        self._server = Server(folder.read_token(), self._on_message, self._on_gone, self._note)
        self._ranks: dict[int, Peer] = {}
        self._rank_of: dict[Peer, int] = {}
        """The rank of each peer whose line holds."""
        self._waiting: list[Peer] = []
        """Clients who asked for a checkpoint."""
        self._hellos: dict[int, Message] = {}
        self._ready: dict[int, Message] = {}
        self._ended: dict[int, int] = {}
        self._left: set[int] = set()
        self._deserted: tuple[float, str] | None = None
        """When the first rank ended without a word to the others, and the cause if they do not end as well."""
        self._attempt: _Attempt | None = None
        self._num_rounds = 0
        """Number of rounds begun in this stay, this one included."""
        self._writing: set[int] = set()
        """Ranks that were told to write their image and have not answered; also when the round has been given up."""
        self._due: list[tuple[float, Mapping[int, Message]]] = []
        """Messages to ranks that wait for their time."""
        self._wanted: tuple[float, bool, int] | None = None
        """(not before, stop, attempt) of a checkpoint that was asked for."""
        self._next_periodic_s: float | None = None
        self._remover = ThreadPoolExecutor(1, "remesh-remover")
        self._removal: Future[list[int]] | None = None
        """The removal of old checkpoints, while it is under way."""
        self._started_s = time.monotonic()
        self._told_to_stop = False
        self.outcome: JobOutcome | None = None
        self.last_checkpoint: Message | None = None
        """The answer that the last round gave to its client."""

    # --- life ---

    def listen(self, listener: socket.socket) -> None:
        """Take connections from this listening socket too."""
        self._server.listen(listener)

    def close(self) -> None:
        """Close all connections, once old checkpoints are removed."""
        self._remover.shutdown()
        self._note_removal()
        self._server.close()

    def step(self, timeout_s: float) -> None:
        """Do the work that is due; wait for more at most ``timeout_s``."""
        now_s = time.monotonic()
        if not self.all_ready and now_s - self._started_s > self._settings.start_limit_s:
            missing = sorted(set(range(self._num_ranks)) - set(self._ready))
            self.fail(
                f"ranks {missing} have not come up after {self._settings.start_limit_s:g} s; see what they printed"
            )
        if self._deserted is not None and now_s - self._deserted[0] > _ALONE_S:
            self.fail(self._deserted[1])
        if self._removal is not None and self._wanted is not None:
            timeout_s = min(timeout_s, _REMOVAL_LOOK_S)
        due = [moment for moment, _ in self._due]
        wait_s = max(min([timeout_s, *(moment - now_s for moment in due)]), 0.0)
        self._server.poll(wait_s)
        self._do_what_is_due(time.monotonic())

    @property
    def all_ready(self) -> bool:
        """Whether every rank's program runs."""
        return len(self._ready) == self._num_ranks

    @property
    def ready_seconds(self) -> dict[int, dict[str, float]]:
        """The seconds that each rank took to come up, by phase."""
        return {rank: message.get("seconds", {}) for rank, message in self._ready.items()}

    def save_and_stop(self) -> None:
        """Take a checkpoint that stops, the polite end. A second call, or one before the job runs, ends it at once."""
        if self._told_to_stop or not self.all_ready:
            self.fail("told to end before a checkpoint could be taken", 143)
        self._told_to_stop = True
        self.request_checkpoint(stop=True)

    def request_checkpoint(self, *, stop: bool) -> None:
        """Take a checkpoint as soon as can be."""
        self._wanted = (0.0, stop or (self._wanted is not None and self._wanted[1]), 1)

    def fail(self, cause: str, exit_code: int = ExitCode.FAILED) -> None:
        """End the job."""
        if self.outcome is None:
            self._end(JobOutcome("failed", cause, exit_code))
            self._tell_ranks({"type": "abort", "cause": cause})

    # --- messages ---

    def _tell_ranks(self, message: Message) -> None:
        for caller in list(self._ranks.values()):
            self._server.tell(caller, message)

    def _tell_each(self, messages: Mapping[int, Message]) -> None:
        for rank, caller in list(self._ranks.items()):
            self._server.tell(caller, messages[rank])

    def _on_message(self, caller: Peer, message: Message) -> None:
        kind = message["type"]
        if caller in self._rank_of:
            self._on_rank_message(self._rank_of[caller], kind, message)
        elif kind == "hello":
            self._on_hello(caller, message)
        elif kind == "checkpoint":
            self._waiting.append(caller)
            self.request_checkpoint(stop=bool(message.get("stop")))
        elif kind == "look":
            self._server.tell(caller, {"type": "state", **self.describe()})

    def _on_gone(self, caller: Peer) -> None:
        rank = self._rank_of.pop(caller, None)
        if rank is not None and rank not in self._left and self.outcome is None:
            self._on_lost(rank, f"its connection from host {self._host_of(rank)} broke")

    def _on_hello(self, caller: Peer, message: Message) -> None:
        rank, size = int(message["rank"]), int(message["size"])
        if size != self._num_ranks or rank in self._ranks:
            self.fail(
                f"rank {rank} of {size} came up, expected each of {self._num_ranks} once; the launcher may have started"
                " single processes, because it does not belong to the library that they run by"
            )
            return
        self._ranks[rank], self._rank_of[caller] = caller, rank
        self._hellos[rank] = message

    def _on_rank_message(self, rank: int, kind: str, message: Message) -> None:
        if kind == "ready":
            self._ready[rank] = message
            if self.all_ready:
                self._on_all_ready()
        elif kind == "status" and self._attempt is not None:
            status = Status.from_json(message["status"])
            self._advance(*self._attempt.round.on_status(status, int(message["wave"]), time.monotonic()))
        elif kind == "imaged":
            self._on_imaged(rank, message)
        elif kind == "ended":
            self._on_ended(rank, int(message["code"]), str(message.get("omitted", "")))
        elif kind == "left":
            self._left.add(rank)
        elif kind == "failed":
            self.fail(f"rank {rank} on host {self._host_of(rank)}: {message['cause']}", int(message.get("code", 1)))

    def _on_imaged(self, rank: int, message: Message) -> None:
        self._writing.discard(rank)
        if self._attempt is not None:
            self._attempt.images[rank] = message
            problem, refused = str(message["problem"]), bool(message.get("refused"))
            self._advance(*self._attempt.round.on_imaged(rank, problem, refused=refused))
        elif not self._writing:
            self._clear_away()

    def _on_all_ready(self) -> None:
        self._folder.change_state("running", f"{self._num_ranks} ranks on {', '.join(self._hosts())}")
        self._note(f"running: {self.describe()['ranks']}")
        for text in sorted({str(message.get("note", "")) for message in self._ready.values()} - {""}):
            self._note(text)
            self._say(text)
        if self._settings.every_s is not None:
            self._next_periodic_s = time.monotonic() + self._settings.every_s

    def _on_ended(self, rank: int, code: int, omitted: str) -> None:
        """``omitted`` names the call by which a program should have told the others that it ends."""
        self._ended[rank] = code
        if omitted and self._deserted is None:
            self._deserted = (
                time.monotonic(),
                f"the program of rank {rank} on host {self._host_of(rank)} ended with exit status {code} without "
                f"{omitted}, and {_ALONE_S:g} s later others still run, which may wait for it; let every rank call it",
            )
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            self.fail(
                f"the program of rank {rank} on host {self._host_of(rank)} {how}", code if code > 0 else 128 - code
            )
        elif len(self._ended) == self._num_ranks and self._attempt is None:
            self._finish()

    def _finish(self) -> None:
        if self.outcome is not None:
            return
        self._end(JobOutcome("finished", "all programs ended with exit status 0", ExitCode.OK))
        self._tell_ranks({"type": "leave"})

    def _on_lost(self, rank: int, why: str) -> None:
        if self._attempt is not None:
            self._advance(*self._attempt.round.on_lost(rank, why))
        self.fail(f"rank {rank} on host {self._host_of(rank)} is gone: {why}")

    # --- rounds ---

    def _do_what_is_due(self, now_s: float) -> None:
        due = [told for moment, told in self._due if moment <= now_s]
        self._due = [(moment, told) for moment, told in self._due if moment > now_s]
        for told in due:
            self._tell_each(told)
        if self._attempt is not None:
            self._advance(*self._attempt.round.on_time(now_s))
        if self._next_periodic_s is not None and now_s >= self._next_periodic_s and self._wanted is None:
            self._wanted = (0.0, False, 1)
            self._next_periodic_s = None
        self._note_removal()
        # A round has the room that a removal makes, and both need the disk: it waits for one that is under way.
        is_busy = self._attempt is not None or self._writing or self._removal is not None
        is_free = not is_busy and self.outcome is None and self.all_ready
        if self._wanted is not None and now_s >= self._wanted[0] and is_free:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        assert self._wanted is not None
        _, stop, attempts = self._wanted
        try:
            number, part = self._folder.begin_checkpoint()
        except OSError as error:
            self._wanted = None
            self._answer(End(Ending.GIVEN_UP, f"no folder could be made in {self._folder.images}: {error}"), {})
            return
        # How long an increment will be nobody knows before.
        lack = "" if self._settings.incremental else self._folder.find_lack_of_room()
        if lack:
            part.rmdir()
            self._wanted = None
            self._answer(End(Ending.GIVEN_UP, lack), {})
            return
        self._num_rounds += 1
        state = Round(self._num_ranks, stop, limit_s=self._settings.round_limit_s)
        self._attempt = _Attempt(state, number, part, now_s, attempts=attempts)
        self._wanted = None
        self._note(f"checkpoint {number}: begun")
        self._advance(*state.begin(now_s))

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
                    self._writing = set(self._ranks)
                    self._tell_ranks({"type": "image", **self._image_request(attempt)})
                case Commit():
                    attempt.imaged_s = time.monotonic()
                    self._advance(*attempt.round.on_committed(self._commit(attempt)))
                case End():
                    self._on_end(attempt, instruction)

    def _ask(self, ask: Ask) -> None:
        assert self._attempt is not None
        message = {"type": "ask", "wave": ask.wave, "step": ask.step.value, "targets": None}
        told = dict.fromkeys(self._ranks, message)
        if ask.targets is not None:
            assert self._attempt.round.before is not None  # targets follow from a wave
            own = split_targets(dict(ask.targets), self._attempt.round.before)
            told = {rank: {**message, "targets": targets} for rank, targets in enumerate(own)}
        if ask.after_s:
            self._due.append((time.monotonic() + ask.after_s, told))
        else:
            self._tell_each(told)

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
        """The checkpoint that the next one may build upon: one of this stay, since tracking begins anew with each."""
        last = self.last_checkpoint
        return None if last is None or not last.get("number") else int(last["number"])

    def _commit(self, attempt: _Attempt) -> str:
        bases = {each for message in attempt.images.values() for each in message["report"].get("builds_upon", ())}
        try:
            added = self._add_to_checkpoint(attempt.part)
        except (Error, OSError) as error:
            return str(error)
        manifest = {
            **added,
            "version": 1,
            "job": self._folder.name,
            "number": attempt.number,
            "num_ranks": self._num_ranks,
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self._made_by(),
            "builds_upon": sorted(bases),
            "ranks": {rank_name(rank): message["report"] for rank, message in sorted(attempt.images.items())},
        }
        try:
            self._folder.commit_checkpoint(attempt.part, manifest)
        except (Error, OSError) as error:
            return str(error)
        return ""

    def _made_by(self) -> dict[str, list[str]]:
        """The answers of the ranks about what runs them: all different ones, by name."""
        told = [dict(hello.get("made_by", {})) for hello in self._hellos.values()]
        return {name: sorted({str(each[name]) for each in told if name in each}) for each in told for name in each}

    def _clear_away(self) -> None:
        """Remove old checkpoints in a thread once the ranks run again: it takes time, and hurts nothing if it fails.

        No round is under way meanwhile, so all that the next one may build upon is known, and kept.
        """
        self._removal = self._remover.submit(self._folder.keep_last, self._settings.keep)

    def _note_removal(self) -> None:
        if self._removal is None or not self._removal.done():
            return
        removal, self._removal = self._removal, None
        try:
            for number in removal.result():
                self._note(f"checkpoint {number}: removed, {self._settings.keep} are kept")
        except (Error, OSError) as error:
            self._say(f"old checkpoints could not be removed: {error}")

    def _on_end(self, attempt: _Attempt, end: End) -> None:
        self._attempt = None
        self._due.clear()
        now_s = time.monotonic()
        seconds = {
            "cut": (attempt.cut_s or now_s) - attempt.began_s,
            "images": (attempt.imaged_s or now_s) - (attempt.cut_s or now_s),
            "total": now_s - attempt.began_s,
        }
        told = {
            "ending": end.ending.value,
            "reason": end.reason,
            "round": self._num_rounds,
            "ended": sorted(self._ended),
        }
        self._tell_ranks({"type": "end", **told})
        if end.ending in (Ending.GIVEN_UP, Ending.LOST):
            # A file that is written while its folder is removed stays behind: the last rank that writes clears it away.
            if not self._writing or end.ending is Ending.LOST:
                self._clear_away()
            self._note(f"checkpoint {attempt.number}: {end.ending.value}: {end.reason}")
            pauses_s = () if end.obstacle is None else _RETRY_AFTER_S.get(end.obstacle, ())
            if attempt.attempts <= len(pauses_s):
                self._try_again(attempt, now_s + pauses_s[attempt.attempts - 1])
                return
            if attempt.attempts > 1:
                end = replace(end, reason=f"{end.reason} (the last of {attempt.attempts} attempts)")
            self._answer(end, {"seconds": seconds, "attempts": attempt.attempts})
        else:
            reports = [message["report"] for message in attempt.images.values()]
            caught = {
                name: sum(int(report["caught"].get(name, 0)) for report in reports)
                for name in sorted({name for report in reports for name in report["caught"]})
            }
            num_bytes = sum(int(report["num_bytes"]) for report in reports)
            answer = {
                "number": attempt.number,
                "folder": str(attempt.part.with_suffix("")),
                "num_bytes": num_bytes,
                "seconds": seconds,
                "caught": caught,
                "attempts": attempt.attempts,
            }
            self._note(f"checkpoint {attempt.number}: committed: {answer}")
            self._answer(end, answer)
            self._clear_away()
        if end.ending is Ending.STOPPED and len(self._ended) < self._num_ranks:
            self._end(JobOutcome("stopped", f"checkpoint {attempt.number} was taken to stop", ExitCode.OK))
        elif len(self._ended) == self._num_ranks and self.outcome is None:
            self._finish()

    def _try_again(self, attempt: _Attempt, not_before_s: float) -> None:
        """Plan another round for the same request, and for one to stop that came meanwhile."""
        stop = attempt.round.stop or (self._wanted is not None and self._wanted[1])
        self._wanted = (not_before_s, stop, attempt.attempts + 1)

    def _answer(self, end: End, more: Message) -> None:
        """Answer everybody who waits for a checkpoint."""
        message = {"type": "checkpointed", "ending": end.ending.value, "reason": end.reason, **more}
        if more.get("number"):
            self.last_checkpoint = message
        else:
            self._say(f"no checkpoint was taken: {end.reason}")
        if self._settings.every_s is not None:
            self._next_periodic_s = time.monotonic() + self._settings.every_s
        if end.ending is Ending.STOPPED:
            self._wanted = None
        if self._wanted is not None:
            return  # asked for while this one was under way, perhaps to stop: the next one is the answer to all
        waiting, self._waiting = self._waiting, []
        for caller in waiting:
            self._server.tell(caller, message)

    # --- what is known ---

    def describe(self) -> dict[str, Any]:
        """Describe the job now, for people."""
        return {
            "job": self._folder.name,
            "num_ranks": self._num_ranks,
            "since_s": round(time.monotonic() - self._started_s, 1),
            "round": None
            if self._attempt is None
            else f"{self._attempt.round.phase.value}: {self._attempt.round.reason}",
            "ranks": [
                {"rank": rank, "host": self._host_of(rank), "pid": hello.get("pid"), "ended": self._ended.get(rank)}
                for rank, hello in sorted(self._hellos.items())
            ],
            "last_checkpoint": self.last_checkpoint,
        }

    def _host_of(self, rank: int) -> str:
        return str(self._hellos.get(rank, {}).get("host", "(unknown)"))

    def _hosts(self) -> list[str]:
        return sorted({self._host_of(rank) for rank in self._hellos})

    def _end(self, outcome: JobOutcome) -> None:
        """End the job; the first outcome stays, whatever was on its way then."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        try:
            self._folder.change_state(outcome.state, outcome.cause)
        except (Error, OSError) as error:
            # The outcome is true all the same, and this process tells it to the user.
            self._say(f"how the job ended could not be noted: {error}")
        self._note(f"{outcome.state}: {outcome.cause}")

    def _note(self, text: str) -> None:
        """Log a line as an event; a disk that has no room for it must not end the job."""
        try:
            self._folder.log_event(text)
        except OSError as error:
            self._say(f"writing {self._folder.logs / 'events.log'}: {error.strerror}; it would say: {text}")
