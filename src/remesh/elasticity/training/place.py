"""Context of a job: the worker process, the generation and its network, and what the program asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from remesh.checkpoint.storage import Location
from remesh.elasticity.model.generation import Generation
from remesh.elasticity.snapshots.taker import SnapshotTaker
from remesh.elasticity.training_state import HeldState
from remesh.groups.lower import LowerHalf


class Leave(BaseException):
    """This rank leaves its generation: the members meet again."""


class Caller(Protocol):
    """The interface of the worker process that a job needs."""

    @property
    def wants_pause(self) -> bool:
        """Whether this rank was asked to come to a meeting after the next step."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether this rank has learned that a member is lost."""
        ...

    @property
    def is_leaving(self) -> bool:
        """Whether this rank will not be at that meeting: its node leaves the job."""
        ...

    def note_step(self) -> None:
        """A batch is behind this rank."""
        ...

    def bind(self) -> None:
        """Make the groups real that the model was built on. Blocks on the others."""
        ...

    def rejoin(self, error: BaseException | None) -> RankPlace | None:
        """Meet the others, and take the same rank in a mesh of the same shape; None when this is not to be had.

        Blocks until the members have met. ``error`` is what ended the step, None between two steps.
        """
        ...

    def resolve_vote(self, error: BaseException) -> bool | None:
        """The outcome of a vote that this rank lost sight of, if any survivor knows it; None if it came to nothing.

        Blocks until the members have met.
        """
        ...


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What :func:`remesh.elastic` was called with; equal on all ranks."""

    checkpoint: Location | None
    """Folder or URL of the job's checkpoints, one sub-folder per step."""
    save_every: int | None
    """Save after every so many steps; None: only when asked."""
    seed: int = 0
    snapshot_every: int | None = None
    """Take a snapshot into other nodes' memory after every so many steps; None: never."""
    timeout_s: float = 600.0
    """Bound on every collective. Above the hang timeout of agents (300 s): who merely keeps the others waiting, in an
    evaluation or a save, is judged by where it stands, and not killed since a clock ran out."""

    changed_data: str = "refuse"
    """What becomes of a dataset that is not the one that the job read before."""

    def describe(self) -> dict[str, str]:
        """By the names that the program gave them under, for comparing."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a worker in a generation: its rank, process groups and snapshots."""

    plan: Generation
    rank: int
    """World rank. Invariant: one of ``plan.members``."""
    lower: LowerHalf
    """The process groups of this generation, grown."""
    taker: SnapshotTaker
    is_pretended: bool = False
    """Whether the groups only pretend, until the job's state is carried."""
    snapshots: tuple[HeldState, ...] = ()
    """What this rank offers from its node's memory besides its own, of earlier steps perhaps."""
