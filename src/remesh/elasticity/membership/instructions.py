"""Events and instructions of an agent's state machine, as values.

The machine itself is in :mod:`remesh.elasticity.membership.membership_machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remesh.elasticity.model.failover import FIRST_PLACE, Place
from remesh.elasticity.model.generation import Generation, NodeInfo, WorkerReport
from remesh.elasticity.model.outcome import Category, Outcome

# --- Events: the inputs of the machine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has connected and is in no generation."""

    report: WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is out of its generation and reports the state that it holds."""

    report: WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerDone:
    """A worker's training function returned."""

    generation: int
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerStepped:
    """A worker has resolved so many batches."""

    step: int


@dataclass(frozen=True, slots=True)
class WorkerSuspects:
    """A worker's collective failed as it does when a peer is lost."""

    slot: int
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """User code raised, or asked for what cannot be."""

    slot: int
    text: str
    category: Category = Category.WORKER


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process ended. Negative codes are signals, as in :mod:`subprocess`."""

    slot: int
    code: int


@dataclass(frozen=True, slots=True)
class NodeDead:
    """Another agent is proved to be gone."""

    index: int
    proof: str
    is_certain: bool = True
    """False when it only fell silent: it may go on elsewhere, cut off from here."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node is to leave the job at the next step boundary: it will be pre-empted."""

    text: str


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """A worker of this node is slower than it may be, as the generation's first node found."""

    generation: int
    rank: int
    ratio: float
    """Its busy time per step over the others' median."""
    reason: str


@dataclass(frozen=True, slots=True)
class StoreView:
    """The current content of the store, as far as this agent's phase needs it."""

    latest: int
    """Number of the last generation decided; 0 before the first."""
    plan: Generation | None
    """Generation ``latest``."""
    nodes: Mapping[int, NodeInfo]
    here: Mapping[int, tuple[WorkerReport, ...]]
    """Workers at the meeting for generation ``latest + 1``: all for its leader, else the leader's and its own."""
    pause: str | None
    """Why generation ``latest`` is to pause."""
    broken: str | None
    """Why generation ``latest`` is broken."""
    done: frozenset[int]
    """Nodes whose workers all ended well in generation ``latest``, for the agent that asked."""
    end: Mapping[str, Any] | None
    place: Place = FIRST_PLACE
    """Which store this is."""
    leader: int | None = None
    """The node that leads the meeting, in the term that was asked for; None while no node does."""


@dataclass(frozen=True, slots=True)
class StoreMoved:
    """Another store is in force: what was written to the old one is to be written again."""


@dataclass(frozen=True, slots=True)
class OutOfReach:
    """No store is to be had: this node's part of the job is over."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """An event without news: time has passed."""


Event = (
    WorkerReady
    | WorkerLeft
    | WorkerDone
    | WorkerStepped
    | WorkerSuspects
    | WorkerFailed
    | WorkerExited
    | NodeDead
    | LeaveAsked
    | StragglerFound
    | StoreView
    | StoreMoved
    | OutOfReach
    | Tick
)


# --- Instructions: the outputs of the machine ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publish:
    """Write a key of the store; with ``once`` only if it is not set."""

    key: str
    value: Mapping[str, Any]
    once: bool = True


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process in a slot."""

    slot: int
    after_s: float = 0.0
    """Not before so many seconds have passed."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """SIGKILL a worker and its children; its exit comes back as an event."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a worker."""

    slot: int
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether these nodes' agents are alive."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Have these nodes' agents look for news at once: they would find it a moment later by themselves."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Write an event to the log."""

    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """End the agent."""

    outcome: Outcome


Instruction = Publish | StartWorker | KillWorker | Tell | Probe | Wake | Note | Finish
