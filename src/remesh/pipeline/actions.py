"""Actions of a pipeline schedule: work of one stage on one micro-batch, and their strings.

An *action* is one piece of work of one stage on one micro-batch. Its string is stage, kind, micro-batch, as in
``2F0``; the same strings as those of ``torch.distributed.pipelining``, so that tables can be exchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from remesh.pipeline.pipeline_error import PipelineError


class ActionKind(StrEnum):
    """The kind of an action; its value is the part of the string between stage and micro-batch."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward, whole: the gradients of the inputs and of the weights."""
    I = "I"  # noqa: E741 - the letter of the literature
    """Backward, first part: the gradients of the inputs, which the stages before wait for."""
    W = "W"
    """Backward, second part: the gradients of the weights, which no other stage waits for."""


_STRING = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one stage.

    >>> str(Action(3, ActionKind.F, 1)), Action.parse("3F1").stage
    ('3F1', 3)
    """

    stage: int
    """Invariant: >= 0."""
    kind: ActionKind
    microbatch: int
    """Invariant: >= 0."""

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise PipelineError(
                f"describing {self.kind} of stage {self.stage} on micro-batch {self.microbatch}: expected numbers >= 0"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a string means; `PipelineError` when it means none."""
        found = _STRING.fullmatch(text.strip())
        if found is None:
            raise PipelineError(f"reading the action {text[:40]!r}: expected stage, kind, micro-batch, as in 2F0")
        stage, kind, microbatch = found.groups()
        return cls(int(stage), ActionKind(kind), int(microbatch))
