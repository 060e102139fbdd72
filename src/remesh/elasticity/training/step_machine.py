"""State machine of a worker's step: what has happened comes in, what is to be done at the next call comes out.

    EMPTY     nothing is carried yet                            a lost rank leaves what was held before
    BETWEEN   the program has called the job since the step     ... the state of the step
    OPEN      a batch is handed out                             ... the state of the step before it
    TAKING    all ranks take it: the program is at it           ... the state of the step, once the program is through
    DROPPED   all ranks drop it                                 ... the state of the step, which changed nothing

Between a commit and the next call a program takes the step, and then may evaluate or log: with collectives, in which a
rank may be lost. What is not known to be whole is not kept. In TAKING the state is whole as soon as every optimizer
that is due has stepped, and none is inside of its step. An optimizer is due at a commit if the program has let it step
after so few commits before, or never yet: so gradients may be accumulated over commits. A program that steps without a
carried optimizer is through when it calls the job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from remesh.foundation.errors import ConfigError


class StepPhase(Enum):
    """Where a worker stands in a step."""

    EMPTY = auto()
    BETWEEN = auto()
    OPEN = auto()
    TAKING = auto()
    DROPPED = auto()


class StepEvent(Enum):
    """What happens to a worker's step."""

    CARRIED = auto()
    CALLED = auto()
    HANDED_OUT = auto()
    TAKEN = auto()
    VOTED_DOWN = auto()
    REJOINED = auto()


class Instruction(Enum):
    """What is to be done at a call of the job, in this order."""

    KEEP_GRADIENTS = auto()
    COMPARE_GRADIENTS = auto()
    COMPARE_STATE = auto()
    HAND_OVER = auto()
    LEAVE = auto()


_TABLE: dict[tuple[StepPhase, StepEvent], StepPhase] = {
    (StepPhase.EMPTY, StepEvent.CARRIED): StepPhase.BETWEEN,
    (StepPhase.EMPTY, StepEvent.CALLED): StepPhase.EMPTY,
    (StepPhase.BETWEEN, StepEvent.CALLED): StepPhase.BETWEEN,
    (StepPhase.BETWEEN, StepEvent.HANDED_OUT): StepPhase.OPEN,
    (StepPhase.OPEN, StepEvent.CALLED): StepPhase.OPEN,
    (StepPhase.OPEN, StepEvent.TAKEN): StepPhase.TAKING,
    (StepPhase.OPEN, StepEvent.VOTED_DOWN): StepPhase.DROPPED,
    (StepPhase.TAKING, StepEvent.CALLED): StepPhase.BETWEEN,
    (StepPhase.DROPPED, StepEvent.CALLED): StepPhase.BETWEEN,
    **{(phase, StepEvent.REJOINED): StepPhase.EMPTY for phase in StepPhase},
}
_REFUSED = {
    StepEvent.CARRIED: "carrying: this generation already carries state; name all objects in one call",
    StepEvent.HANDED_OUT: "asking for batches: the batch before is not resolved; call job.commit() first",
    StepEvent.TAKEN: "committing: no batch has been taken; call commit once for each batch of job.batches(...)",
    StepEvent.VOTED_DOWN: "committing: no batch has been taken; call commit once for each batch of job.batches(...)",
}


@dataclass(slots=True)
class _Stepper:
    """An optimizer, as far as steps go."""

    waited: int = 0
    """Commits since it stepped."""
    period: int | None = None
    """Fewest commits from one of its steps to the next; None before the first."""
    depth: int = 0
    """Calls of its step that are under way: one class of optimizers may call another's."""

    @property
    def is_due(self) -> bool:
        return self.waited > 0 and (self.period is None or self.waited >= self.period)


class StepMachine:
    """Where one worker stands in its step, and what it owes the others at the next call."""

    def __init__(self) -> None:
        self.phase = StepPhase.EMPTY
        self.num_steps = 0
        """Batches resolved in this generation."""
        self._steppers: dict[str, _Stepper] = {}
        self._owed: set[Instruction] = set()
        self._done: set[Instruction] = set()
        """What is owed once in a generation, and was done."""

    def carried(self, optimizers: Collection[str], *, is_proved: bool = False) -> None:
        """The state of the job is filled into what the program carries; ``is_proved``: ranks have compared theirs."""
        self._move(StepEvent.CARRIED)
        if is_proved:
            self._done.add(Instruction.COMPARE_STATE)
        self._steppers = {name: self._steppers.get(name, _Stepper()) for name in optimizers}

    def check(self, event: StepEvent) -> None:
        """Raise `ConfigError` if this cannot happen now."""
        if (self.phase, event) not in _TABLE:
            raise ConfigError(_REFUSED[event])

    def handed_out(self) -> None:
        """A batch is in the program's hands."""
        self._move(StepEvent.HANDED_OUT)

    def voted(self, is_taken: bool, owed: Collection[Instruction] = ()) -> None:
        """All ranks know the outcome of the batch; what they owe each other at the next call."""
        self._move(StepEvent.TAKEN if is_taken else StepEvent.VOTED_DOWN)
        self.num_steps += 1
        # The first step makes what was not there when state was carried.
        self._owed = {Instruction.KEEP_GRADIENTS, *owed} | ({Instruction.COMPARE_STATE} - self._done)
        self._owed -= {Instruction.COMPARE_GRADIENTS} & self._done
        for stepper in self._steppers.values():
            stepper.waited += is_taken
            stepper.depth = 0

    def called(self) -> list[Instruction]:
        """The program calls the job between two batches: what is to be done now."""
        self._move(StepEvent.CALLED)
        if self.phase is not StepPhase.BETWEEN:
            return []
        owed = [one for one in Instruction if one in self._owed]
        # A rank that is to leave is so until a new generation begins.
        self._owed &= {Instruction.LEAVE}
        self._done.update({Instruction.COMPARE_STATE, Instruction.COMPARE_GRADIENTS}.intersection(owed))
        return owed

    def began(self, optimizer: str) -> None:
        """An optimizer begins its step."""
        if self.phase is StepPhase.TAKING and optimizer in self._steppers:
            self._steppers[optimizer].depth += 1

    def stepped(self, optimizer: str) -> None:
        """An optimizer is through with its step."""
        if self.phase is not StepPhase.TAKING or optimizer not in self._steppers:
            return
        stepper = self._steppers[optimizer]
        stepper.depth -= 1
        if not stepper.depth and stepper.waited:
            stepper.period = min(stepper.waited, stepper.period or stepper.waited)
            stepper.waited = 0

    def rejoined(self) -> None:
        """The worker is in a new generation, in its place: nothing is carried there yet."""
        self._move(StepEvent.REJOINED)
        self.num_steps = 0
        self._owed.clear()
        self._done.clear()

    @property
    def is_open(self) -> bool:
        """Whether a batch is handed out, and not resolved."""
        return self.phase is StepPhase.OPEN

    @property
    def is_whole(self) -> bool:
        """Whether the state belongs to a step: that of the position."""
        if self.phase is not StepPhase.TAKING:
            return self.phase is not StepPhase.EMPTY
        each = self._steppers.values()
        return bool(each) and not any(one.depth or one.is_due for one in each)

    def _move(self, event: StepEvent) -> None:
        self.check(event)
        self.phase = _TABLE[self.phase, event]
