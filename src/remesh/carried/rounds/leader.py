"""Leader (coordinator) of a job: one process that hears all ranks, leads checkpoint rounds, answers its user.

One thread, one `step` at a time: messages that have arrived, rounds that are due, nothing that blocks. Who the ranks
are stands in `remesh.carried.rounds.ranks`, what becomes of a request for a checkpoint in
`remesh.carried.rounds.checkpointing`.

    rank      hello, meet, ready, status, imaged, ended, failed, left    <->    met, ask, image, end, leave, abort
    client    checkpoint, look                               <->    checkpointed, state
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remesh.carried.rounds.checkpointing import Checkpointing, Settings
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder
from remesh.carried.rounds.journal import Journal
from remesh.carried.rounds.ranks import Ranks
from remesh.carried.rounds.round_machine import End, Ending
from remesh.foundation.errors import Error
from remesh.foundation.exit_codes import ExitCode, of_signal
from remesh.wire.messages import Message
from remesh.wire.server import Peer, Server

_OTHERS_TIMEOUT_S = 60.0
"""Time for all ranks to end once one has ended without notice to the others, who may wait for it for ever.

Launchers of MPI end the others at once, or, where none of them waits, let all end so; no rank knows which will wait.
"""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The outcome of one run of a job."""

    state: str
    """``finished``, ``stopped`` or ``failed``."""
    cause: str
    exit_code: int
    is_wanted: bool = False
    """Whether its user had asked for the end, even if it came otherwise."""


class Coordinator:
    """The leader of one run of a job; call `step` until ``outcome`` is set."""

    def __init__(
        self,
        folder: JobFolder,
        num_ranks: int,
        settings: Settings,
        add_to_checkpoint: Callable[[Path], Mapping[str, Any]] = lambda _: {},
        begun_from: Checkpoint | None = None,
    ) -> None:
        """``begun_from`` is the checkpoint that this run of the job begins from, if any.

        ``add_to_checkpoint`` writes what the leader itself has into the folder of a checkpoint, while all ranks
        are stopped, and returns its entries for the manifest.
        """
        self._folder = folder
        self._settings = settings
        self._begun_from = begun_from
        self._journal = Journal(folder)
        self._server = Server(folder.read_token(), self._on_message, self._on_gone, self._journal.note)
        self._ranks = Ranks(num_ranks, self._server.tell)
        self._checkpointing = Checkpointing(
            folder, self._ranks, settings, self._journal, add_to_checkpoint, self._on_answer
        )
        self._waiting: list[Peer] = []
        """Clients who asked for a checkpoint."""
        self._deserted: tuple[float, str] | None = None
        """When the first rank ended without a word to the others, and the cause if they do not end as well."""
        self._started_s = time.monotonic()
        self._told_to_stop = False
        """By a signal."""
        self._is_to_end = False
        """Whether the end has been asked for, by a signal or with a checkpoint."""
        self.outcome: JobOutcome | None = None

    # --- life ---

    def listen(self, listener: socket.socket) -> None:
        """Take connections from this listening socket too."""
        self._server.listen(listener)

    def close(self) -> None:
        """Close all connections, once old checkpoints are removed; only the end of all programs waits for that."""
        if self.outcome is None or self.outcome.state != "finished":
            self._checkpointing.break_off_removal()
        self._checkpointing.close()
        self._server.close()

    def step(self, timeout_s: float) -> None:
        """Do the work that is due; wait for more at most ``timeout_s``."""
        now_s = time.monotonic()
        if not self.all_ready and now_s - self._started_s > self._settings.start_limit_s:
            missing = sorted(set(range(self._ranks.num_ranks)) - set(self._ranks.ready))
            self.fail(
                f"ranks {missing} have not come up after {self._settings.start_limit_s:g} s; see what they printed"
            )
        if self._deserted is not None and now_s - self._deserted[0] > _OTHERS_TIMEOUT_S:
            self.fail(self._deserted[1])
        self._server.poll(self._checkpointing.patience_s(timeout_s, now_s))
        self._checkpointing.do_what_is_due(time.monotonic(), may_begin=self.all_ready and self.outcome is None)

    @property
    def all_ready(self) -> bool:
        """Whether every rank's program runs."""
        return self._ranks.all_ready

    @property
    def ready_seconds(self) -> dict[int, dict[str, float]]:
        """The seconds that each rank took to come up, by phase."""
        return {rank: message.get("seconds", {}) for rank, message in self._ranks.ready.items()}

    @property
    def last_checkpoint(self) -> Message | None:
        """The answer that the last round which made a checkpoint gave to its client."""
        return self._checkpointing.last

    def save_and_stop(self) -> None:
        """Take a checkpoint that stops, the polite end. A second call, or one before the job runs, ends it at once.

        A job whose ranks are still coming up from a checkpoint is stopped by that one.
        """
        self._is_to_end = True
        if not self.all_ready and self._begun_from is not None:
            cause = f"checkpoint {self._begun_from.number} holds, from which its ranks were coming up"
            self._end_early(JobOutcome("stopped", cause, ExitCode.OK))
        elif self._told_to_stop or not self.all_ready:
            self.fail("asked to end before a checkpoint could be taken", of_signal(signal.SIGTERM))
        else:
            self._told_to_stop = True
            self.request_checkpoint(stop=True)

    def request_checkpoint(self, *, stop: bool) -> None:
        """Take a checkpoint as soon as can be."""
        self._is_to_end |= stop
        self._checkpointing.request(stop=stop)

    def interrupt(self) -> None:
        """End the job at once, as its user wants."""
        self._is_to_end = True
        self.fail("interrupted by its user", of_signal(signal.SIGINT))

    def fail(self, cause: str, exit_code: int = ExitCode.FAILED) -> None:
        """End the job."""
        self._end_early(JobOutcome("failed", cause, exit_code, self._is_to_end))

    def describe(self) -> dict[str, Any]:
        """Describe the job now, for people."""
        return {
            "job": self._folder.name,
            "num_ranks": self._ranks.num_ranks,
            "since_s": round(time.monotonic() - self._started_s, 1),
            "round": self._checkpointing.describe(),
            "ranks": self._ranks.describe(),
            "last_checkpoint": self.last_checkpoint,
        }

    # --- messages ---

    def _on_message(self, caller: Peer, message: Message) -> None:
        kind = message["type"]
        if (rank := self._ranks.find(caller)) is not None:
            self._on_rank_message(rank, kind, message)
        elif kind == "hello" and self.outcome is not None:
            self._server.tell(caller, {"type": "abort", "cause": self.outcome.cause})
        elif kind == "hello":
            if problem := self._ranks.add(caller, message):
                self.fail(problem)
        elif kind == "checkpoint":
            self._waiting.append(caller)
            self.request_checkpoint(stop=bool(message.get("stop")))
        elif kind == "look":
            self._server.tell(caller, {"type": "state", **self.describe()})

    def _on_gone(self, caller: Peer) -> None:
        rank = self._ranks.drop(caller)
        if rank is not None and self.outcome is None:
            host = self._ranks.host_of(rank)
            why = f"its connection from host {host} broke"
            self._checkpointing.on_lost(rank, why)
            self.fail(f"rank {rank} on host {host} is gone: {why}")

    def _on_rank_message(self, rank: int, kind: str, message: Message) -> None:
        match kind:
            case "ready":
                self._ranks.ready[rank] = message
                if self.all_ready and self.outcome is None:
                    self._on_all_ready()
            case "meet":
                self._ranks.meet(rank, str(message["step"]))
            case "status":
                self._checkpointing.on_status(message)
            case "imaged":
                self._checkpointing.on_imaged(rank, message)
            case "ended":
                self._on_ended(rank, int(message["code"]), str(message.get("omitted", "")))
            case "left":
                self._ranks.left.add(rank)
            case "failed":
                code = int(message.get("code", 1))
                self.fail(f"rank {rank} on host {self._ranks.host_of(rank)}: {message['cause']}", code)

    def _on_all_ready(self) -> None:
        self._folder.change_state("running", f"{self._ranks.num_ranks} ranks on {', '.join(self._ranks.hosts())}")
        self._journal.note(f"running: {self._ranks.describe()}")
        for text in sorted({str(message.get("note", "")) for message in self._ranks.ready.values()} - {""}):
            self._journal.note(text)
            self._journal.warn(text)
        self._checkpointing.begin_period()

    # --- ends ---

    def _on_ended(self, rank: int, code: int, omitted: str) -> None:
        """``omitted`` names the call by which a program should have announced its end to the others."""
        self._ranks.ended[rank] = code
        program = f"the program of rank {rank} on host {self._ranks.host_of(rank)}"
        if omitted and self._deserted is None:
            self._deserted = (
                time.monotonic(),
                f"{program} ended with exit status {code} without {omitted}, and {_OTHERS_TIMEOUT_S:g} s later others "
                "still run, which may wait for it; let every rank call it",
            )
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            self.fail(f"{program} {how}", code if code > 0 else 128 - code)
        elif self._ranks.all_ended and not self._checkpointing.is_under_way:
            self._finish()

    def _on_answer(self, end: End, message: Message | None) -> None:
        """Report the result to all clients that wait for a checkpoint, and end the job if that was its last."""
        if message is not None:
            waiting, self._waiting = self._waiting, []
            for caller in waiting:
                self._server.tell(caller, message)
        if self._ranks.all_ended:
            self._finish()
        elif end.ending is Ending.STOPPED:
            assert self.last_checkpoint is not None  # by which it stopped
            cause = f"checkpoint {self.last_checkpoint['number']} was taken to stop"
            self._end(JobOutcome("stopped", cause, ExitCode.OK))

    def _finish(self) -> None:
        if self.outcome is None:
            self._end(JobOutcome("finished", "all programs ended with exit status 0", ExitCode.OK))
            self._ranks.send_all({"type": "leave"})

    def _end_early(self, outcome: JobOutcome) -> None:
        """End the job while its ranks run or come up."""
        if self.outcome is None:
            self._end(outcome)
            self._ranks.send_all({"type": "abort", "cause": outcome.cause})

    def _end(self, outcome: JobOutcome) -> None:
        """End the job; the first outcome stays, whatever was on its way then."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        try:
            self._folder.change_state(outcome.state, outcome.cause)
        except (Error, OSError) as error:
            # The outcome is true all the same, and this process reports it to the user.
            self._journal.warn(f"how the job ended could not be noted: {error}")
        self._journal.note(f"{outcome.state}: {outcome.cause}")
