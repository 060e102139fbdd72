"""Actions of a pipeline schedule: work of one stage on one micro-batch, and their strings.

An *action* is one piece of work of one stage on one micro-batch. Its string is stage, kind, micro-batch, as in
``2F0`` or ``3SEND_F1``; the same strings as those of ``torch.distributed.pipelining``, so that tables can be exchanged.
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
    SEND_F = "SEND_F"
    """Outputs of a forward leave the stage."""
    RECV_F = "RECV_F"
    """Inputs of a forward arrive."""
    SEND_B = "SEND_B"
    """Gradients of the inputs leave the stage."""
    RECV_B = "RECV_B"
    """Gradients of the outputs arrive."""
    UNSHARD = "UNSHARD"
    """Parameters are gathered within the stage."""
    RESHARD = "RESHARD"
    """Gathered parameters are let go."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Gradients of the weights are summed within the stage."""
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"
    """That sum is waited for."""
    WAIT_SEND_F = "WAIT_SEND_F"
    """Outputs of a forward have left the stage."""
    WAIT_SEND_B = "WAIT_SEND_B"
    """Gradients of the inputs have left the stage."""


COMPUTE_KINDS = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
COMMUNICATION_KINDS = frozenset({ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B})
_STRING = re.compile(rf"(\d{{1,6}})({'|'.join(sorted(ActionKind, key=len, reverse=True))})(\d{{0,6}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one stage.

    >>> str(Action(3, ActionKind.SEND_F, 1)), str(Action.parse("1UNSHARD"))
    ('3SEND_F1', '1UNSHARD')
    """

    stage: int
    """Invariant: >= 0."""
    kind: ActionKind
    microbatch: int | None
    """Invariant: >= 0 for compute and communication; None or >= 0 otherwise."""

    def __post_init__(self) -> None:
        needs_microbatch = self.kind in COMPUTE_KINDS or self.kind in COMMUNICATION_KINDS
        if self.stage < 0 or (self.microbatch or 0) < 0 or (needs_microbatch and self.microbatch is None):
            raise PipelineError(
                f"describing {self.kind} of stage {self.stage} on micro-batch {self.microbatch}: expected numbers "
                ">= 0, and a micro-batch for all that computes or communicates"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """Whether the stage computes in it, rather than communicates."""
        return self.kind in COMPUTE_KINDS

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a string means; `PipelineError` when it means none."""
        found = _STRING.fullmatch(text.strip())
        if found is None:
            raise PipelineError(
                f"reading the action {text[:40]!r}: expected stage, kind, micro-batch, as in 2F0 or 3SEND_F1"
            )
        stage, kind, microbatch = found.groups()
        return cls(int(stage), ActionKind(kind), int(microbatch) if microbatch else None)
