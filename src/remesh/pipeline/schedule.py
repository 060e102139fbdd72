"""Schedule of a pipeline: a table of actions, one row for each rank.

A schedule has one row for each pipeline rank: what it computes, in order. It leaves out communication, which follows
from it and the stage graph: what a stage makes is sent as soon as it is made (the outputs of F, the gradients of I or
B), and what it needs is received ahead. It leaves out time, which `remesh.pipeline.step_simulation` computes;
`remesh.pipeline.schedule_check` decides whether it can run at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remesh.pipeline.actions import Action
from remesh.pipeline.pipeline_error import PipelineError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of actions, one row for each pipeline rank.

    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> [str(action) for action in one_f_one_b(2, 3).rows[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """

    name: str
    """What people call it."""
    num_stages: int
    """Invariant: >= 1."""
    num_microbatches: int
    """Invariant: >= 1."""
    rows: tuple[tuple[Action, ...], ...]
    """Row ``r`` is what pipeline rank ``r`` computes, in order. Invariant: stages and micro-batches in range; all work
    of a stage in one row. In schedules that this project makes row ``s`` is that of stage ``s``."""

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_microbatches < 1:
            raise PipelineError(
                f"building the schedule {self.name!r}: expected at least 1 stage and 1 micro-batch, found "
                f"{self.num_stages} and {self.num_microbatches}"
            )
        row_of: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            for action in row:
                self._check(action)
                if row_of.setdefault(action.stage, number) != number:
                    raise PipelineError(
                        f"building the schedule {self.name!r}: {action} is in row {number}, but stage {action.stage} "
                        f"works in row {row_of[action.stage]}; a stage lives on one rank"
                    )

    def _check(self, action: Action) -> None:
        if action.stage >= self.num_stages or action.microbatch >= self.num_microbatches:
            raise PipelineError(
                f"building the schedule {self.name!r}: {action} is outside its {self.num_stages} stages and "
                f"{self.num_microbatches} micro-batches; leave it out, or raise the numbers"
            )

    @property
    def row_of(self) -> dict[int, int]:
        """The row of every stage that has work."""
        return {action.stage: number for number, row in enumerate(self.rows) for action in row}

    def actions(self) -> Iterator[Action]:
        """All actions, row by row."""
        for row in self.rows:
            yield from row
