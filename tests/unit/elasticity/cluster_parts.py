"""What a cluster in one thread is made of: workers that count, stores that are dicts, agents with real machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh.elasticity.membership.instructions import Finish
from remesh.elasticity.membership.membership_machine import AgentMachine
from remesh.elasticity.membership.view import StoreReader
from remesh.elasticity.model.failover import Opening, Place
from remesh.elasticity.model.generation import Generation, WorkerReport
from remesh.elasticity.model.mesh_policy import make_template


@dataclass
class FakeWorker:
    """A worker that counts steps instead of training."""

    pid: int
    slot: int
    step: int | None = None
    """Batches resolved in its state; None before it was filled."""
    in_doubt: bool = False
    plan: Generation | None = None
    """The generation it trains in; None when it is in none."""
    met_in: FakeStore | None = None
    """The store that it was sent to, to meet the others of its generation."""
    paused: bool = False
    is_leaving: bool = False
    """Whether it was asked to hand on what it holds."""
    done: bool = False

    @property
    def generation(self) -> int:
        """Number of its generation; 0 when it is in none."""
        return 0 if self.plan is None else self.plan.number

    def report(self, template: dict[str, int]) -> WorkerReport:
        return WorkerReport(
            self.slot,
            self.pid,
            make_template(template).to_json(),
            self.step,
            self.in_doubt,
            is_dispensable=self.is_leaving and not self.in_doubt,
        )


@dataclass
class FakeStore:
    """What one store holds."""

    keys: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    opening: Opening | None = None
    """What it was opened with; None for an agent's store that stands by."""
    movers: set[int] = field(default_factory=set)

    @property
    def place(self) -> Place:
        assert self.opening is not None
        return self.opening.place

    def get(self, key: str) -> Mapping[str, Any] | None:
        """For readers: the value of a key."""
        return self.keys.get(key)

    def get_all(self, keys: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """For readers: the values of keys."""
        return [self.keys.get(key) for key in keys]

    def count(self, key: str) -> int:
        """For readers: how many nodes took a number here; some of these numbers belong to nodes elsewhere."""
        assert self.opening is not None and key == "nodes/count"
        taken = [int(key.removeprefix("nodes/")) for key in self.keys if key.startswith("nodes/")]
        return max(0, max(taken, default=-1) + 1 - self.opening.first_index)

    def plans(self) -> list[Generation]:
        """Generations decided here or brought along, in order."""
        found = [Generation.from_json(value) for key, value in self.keys.items() if key.endswith("/plan")]
        return sorted(found, key=lambda plan: plan.number)


@dataclass
class FakeAgent:
    """A machine and its workers. ``alive`` is False once it was killed or has finished."""

    machine: AgentMachine
    store: FakeStore
    """The one that it uses."""
    workers: dict[int, FakeWorker] = field(default_factory=dict)
    next_pid: int = 100
    """Every node counts its processes from the same number, as containers do."""
    alive: bool = True
    finish: Finish | None = None
    standby: FakeStore = field(default_factory=FakeStore)
    """Its own."""
    side: int = 0
    """Nodes on different sides of a cut network do not reach each other."""
    is_silent: bool = False
    """Whether its machine answers nothing once the node is dead, not even by refusing."""
    frozen: bool = False
    """Whether it stands still with its workers, as under SIGSTOP."""
    seen_step: int = 0
    """Batches that it was told of by its workers, of which some may be gone."""
    reader: StoreReader = field(default_factory=StoreReader)
    unheard_since_s: dict[int, float] = field(default_factory=dict)
    """Nodes that it watches and does not hear, and since when."""
