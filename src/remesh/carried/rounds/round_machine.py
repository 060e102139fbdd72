"""State machine of a checkpoint round at the coordinator: events in, instructions out.

    HOLD    agree on the collectives that have to end, and let them end (of programs that have a clock)
    CLOSE   ranks take no requests; the network drains
    IMAGE   each rank writes its image and the state of its lower half
    COMMIT  one manifest makes them a checkpoint
    DONE    ranks go on, or stop

Ranks are asked in waves: an `Ask` goes to all, each answers with one `Status`, the wave is judged when all are in. In
HOLD and CLOSE a rank may be released at any time without harm, so a round that takes too long, or that a rank refuses,
ends there: all ranks resume and the reason is reported. A failed image does the same; nothing of the round is kept.

No clock is read here: events bring the time, and an `Ask` carries how long to wait before it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from remesh.carried.rounds.answers import Answers
from remesh.carried.rounds.clock import MAX_RAISES, Verdict, decide_by_clock
from remesh.carried.rounds.drain import find_traffic, is_drained
from remesh.carried.rounds.status import Status

WAVE_POLL_S = 0.002
"""Time between a wave that did not decide and the next one."""
STUCK_TIMEOUT_S = 0.1
"""Time without any change after which the clock takes the ranks for stuck."""


class RoundPhase(Enum):
    """The phase of a round."""

    HOLD = "hold"
    CLOSE = "close"
    IMAGE = "image"
    COMMIT = "commit"
    DONE = "done"


class Ending(Enum):
    """The way in which a round ended."""

    RESUMED = "resumed"
    """There is a checkpoint, and the job goes on."""
    STOPPED = "stopped"
    """There is a checkpoint, and the job ends with it."""
    GIVEN_UP = "given up"
    """There is no new checkpoint; the job goes on."""
    LOST = "lost"
    """A rank died; there is no new checkpoint."""


class Obstacle(Enum):
    """The reason why a round was given up; the leader of the job decides whether another one may do better."""

    NO_CUT = "no cut"
    """The ranks did not come to a common cut within the limits."""
    REFUSED = "refused"
    """A program has something now that an image cannot hold; it may be gone in a moment: an open socket."""
    FAILED = "failed"
    """Files could not be written."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An instruction to all ranks: take up this step and answer with a `Status`."""

    wave: int
    step: RoundPhase
    """HOLD or CLOSE."""
    targets: tuple[tuple[str, int], ...] | None
    """The number up to which collectives may be entered; None: none beyond those that are."""
    after_s: float = 0.0
    """Time to wait before it is sent."""


@dataclass(frozen=True, slots=True)
class TakeImage:
    """An instruction to all ranks: write the image and the state of the lower half, report when it is on the disk."""


@dataclass(frozen=True, slots=True)
class Commit:
    """An instruction to the coordinator: make what the ranks wrote a checkpoint."""


@dataclass(frozen=True, slots=True)
class End:
    """An instruction to all ranks and to the one who asked: the round is over."""

    ending: Ending
    reason: str
    obstacle: Obstacle | None = None
    """The obstacle of a round that was given up."""


Instruction = Ask | TakeImage | Commit | End


@dataclass(frozen=True, slots=True)
class Round:
    """A round that is under way; its methods return the round after an event and the instructions that follow."""

    num_ranks: int
    stop: bool
    """Whether the job ends with this checkpoint."""
    limit_s: float = 60.0
    """A round that has not come to its images after this time is given up."""
    started_s: float = 0.0
    phase: RoundPhase = RoundPhase.HOLD
    wave: int = 0
    targets: tuple[tuple[str, int], ...] | None = None
    answers: Answers[Status] | None = None
    """The answers of this wave; None before the first."""
    before: tuple[Status, ...] | None = None
    """The wave before this one."""
    changed_s: float = 0.0
    """When a wave last differed from the one before it."""
    num_raises: int = 0
    """Number of times that the clock let ranks past a target because nothing moved."""
    imaged: Answers[bool] | None = None
    """The ranks that have written their image; None before they are asked."""
    reason: str = ""
    """The reason of the last verdict, for people."""

    def begin(self, now_s: float) -> tuple[Round, tuple[Instruction, ...]]:
        """Begin the round: ask for the first wave."""
        return replace(self, started_s=now_s, changed_s=now_s)._ask(None, after_s=0.0)

    def on_status(self, status: Status, wave: int, now_s: float) -> tuple[Round, tuple[Instruction, ...]]:
        """Take the answer of a rank; answers to waves that are over are passed over."""
        if self.phase not in (RoundPhase.HOLD, RoundPhase.CLOSE) or wave != self.wave:
            return self, ()
        if status.refusals:
            why = f"rank {status.rank} cannot be imaged: {'; '.join(status.refusals)}"
            return self._give_up(Obstacle.REFUSED, why)
        assert self.answers is not None
        answers = self.answers.add(status.rank, status)
        waiting = replace(self, answers=answers)
        return (waiting, ()) if answers.num_missing else waiting._judge(answers.given(), now_s)

    def on_imaged(self, rank: int, problem: str, *, refused: bool = False) -> tuple[Round, tuple[Instruction, ...]]:
        """Note that a rank has written its files, or could not: ``problem`` is the reason, and is empty otherwise.

        ``refused``: the reason is in its program, and not in its files.
        """
        if self.phase is not RoundPhase.IMAGE:
            return self, ()
        if problem:
            obstacle = Obstacle.REFUSED if refused else Obstacle.FAILED
            return self._give_up(obstacle, f"rank {rank} could not write its image: {problem}")
        imaged = (self.imaged or Answers.none(self.num_ranks)).add(rank, True)
        written = replace(self, imaged=imaged)
        if imaged.num_missing:
            return written, ()
        return replace(written, phase=RoundPhase.COMMIT), (Commit(),)

    def on_committed(self, problem: str) -> tuple[Round, tuple[Instruction, ...]]:
        """Note that the manifest is on the disk, or could not be written."""
        if self.phase is not RoundPhase.COMMIT:
            return self, ()
        if problem:
            return self._give_up(Obstacle.FAILED, f"the checkpoint could not be committed: {problem}")
        ending = Ending.STOPPED if self.stop else Ending.RESUMED
        return replace(self, phase=RoundPhase.DONE), (End(ending, "committed"),)

    def on_lost(self, rank: int, cause: str) -> tuple[Round, tuple[Instruction, ...]]:
        """End the round, since a rank is gone."""
        if self.phase is RoundPhase.DONE:
            return self, ()
        return replace(self, phase=RoundPhase.DONE), (End(Ending.LOST, f"rank {rank} is gone: {cause}"),)

    def on_time(self, now_s: float) -> tuple[Round, tuple[Instruction, ...]]:
        """Give up when the limit has passed. Writing images has no limit: it ends, or fails, by itself."""
        if self.phase not in (RoundPhase.HOLD, RoundPhase.CLOSE) or now_s - self.started_s <= self.limit_s:
            return self, ()
        silent = [] if self.answers is None else self.answers.silent()
        why = f"{self.reason or 'no wave was complete'}; in this wave ranks {silent} have not answered"
        return self._give_up(Obstacle.NO_CUT, f"no cut after {self.limit_s:g} s: {why}")

    def _judge(self, wave: tuple[Status, ...], now_s: float) -> tuple[Round, tuple[Instruction, ...]]:
        changed_s = self.changed_s if wave == self.before else now_s
        known = replace(self, before=wave, changed_s=changed_s)
        if self.phase is RoundPhase.HOLD:
            return known._judge_counts(wave, now_s)
        drained, why = is_drained(self.before, wave)
        known = replace(known, reason=why)
        if not drained:
            # A wave that only needs to be confirmed has nothing to wait for.
            return known._ask(self.targets, after_s=_pause(known, now_s) if find_traffic(wave) else 0.0)
        return replace(known, phase=RoundPhase.IMAGE), (TakeImage(),)

    def _judge_counts(self, wave: tuple[Status, ...], now_s: float) -> tuple[Round, tuple[Instruction, ...]]:
        targets = None if self.targets is None else dict(self.targets)
        verdict = decide_by_clock(wave, targets, is_stuck=now_s - self.changed_s >= STUCK_TIMEOUT_S)
        known = replace(self, reason=verdict.reason)
        if verdict.aligned:
            return replace(known, phase=RoundPhase.CLOSE)._ask(verdict.targets, after_s=0.0)
        return known._ask_again(verdict, now_s)

    def _ask_again(self, verdict: Verdict, now_s: float) -> tuple[Round, tuple[Instruction, ...]]:
        if verdict.targets == self.targets:
            return self._ask(verdict.targets, after_s=_pause(self, now_s))
        # The first targets are no raise: they show what has ended.
        raised = replace(self, num_raises=self.num_raises + (self.targets is not None), changed_s=now_s)
        if raised.num_raises > MAX_RAISES:
            return raised._give_up(Obstacle.NO_CUT, f"no cut after {MAX_RAISES} raised targets: {verdict.reason}")
        return raised._ask(verdict.targets, after_s=0.0)

    def _ask(
        self, targets: tuple[tuple[str, int], ...] | None, *, after_s: float
    ) -> tuple[Round, tuple[Instruction, ...]]:
        asked = replace(self, wave=self.wave + 1, targets=targets, answers=Answers.none(self.num_ranks))
        return asked, (Ask(asked.wave, self.phase, targets, after_s),)

    def _give_up(self, obstacle: Obstacle, reason: str) -> tuple[Round, tuple[Instruction, ...]]:
        return replace(self, phase=RoundPhase.DONE), (End(Ending.GIVEN_UP, reason, obstacle),)


def _pause(state: Round, now_s: float) -> float:
    """The pause before the next wave: short at first, longer the longer nothing changes, at most 25 times as long."""
    return WAVE_POLL_S * min(1.0 + (now_s - state.changed_s) / WAVE_POLL_S, 25.0)
