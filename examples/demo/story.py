"""Facts of a job drawn from its event logs. Pure: events in, values out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """A part of a change of mesh."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Change:
    """How the job came from one generation to the next."""

    generation: int
    """The one it came to."""
    axes: dict[str, int]
    step: int
    reason: str
    phases: tuple[Phase, ...]
    bytes_by_node: dict[tuple[str, str], int]
    """(giving node, taking node) -> bytes moved between their ranks."""
    bytes_kept: int
    bytes_from_disk: int

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def bytes_from_peers(self) -> int:
        return sum(self.bytes_by_node.values())


@dataclass
class Story:
    """One job, as told by its events."""

    name: str
    events: list[Event] = field(default_factory=list)

    def of_kind(self, kind: str, **wanted: Any) -> list[Event]:
        return [
            e for e in self.events if e["kind"] == kind and all(e.get(key) == value for key, value in wanted.items())
        ]

    @property
    def generations(self) -> list[Event]:
        """The plans, each once, in order."""
        plans = {event["number"]: event for event in self.of_kind("generation")}
        return [plans[number] for number in sorted(plans)]

    @property
    def losses(self) -> dict[int, float]:
        """Step -> loss of its whole batch."""
        return {event["step"]: event["loss"] for event in self.of_kind("step")}

    def steps_per_s(self, generation: int) -> float:
        """Steps of a generation over the time between its first and its last."""
        told = {event["step"]: event["t"] for event in self.of_kind("step", generation=generation)}
        return (len(told) - 1) / ((max(told.values()) - min(told.values())) or 1.0)

    def pids_on(self, node: str, generation: int) -> list[int]:
        """Processes of a node that were members of a generation."""
        plan = self.generations[generation - 1]
        return sorted(one["pid"] for one in plan["members"] if plan["hosts"][str(one["node"])] == node)

    def change_to(self, generation: int, begun_s: float) -> Change:
        """The change that led to a generation, from the moment it began to the first step of all on the new mesh."""
        plan = self.generations[generation - 1]
        filled = self.of_kind("filled", generation=generation)
        first_step = min(e["step"] for e in self.of_kind("step", generation=generation))
        marks = {
            "leave": [e["t"] for e in self.of_kind("left", generation=generation - 1)],
            "meet": [e["t"] for e in self.of_kind("generation", number=generation)],
            "grow": [e["t"] for e in self.of_kind("grown", generation=generation)],
            "fill": [e["t"] for e in filled],
            "first step": [e["t"] for e in self.of_kind("step", generation=generation, step=first_step)],
        }
        phases, since_s = [], begun_s
        for name, times in marks.items():
            until_s = max(times, default=since_s)
            phases.append(Phase(name, max(0.0, until_s - since_s)))
            since_s = max(since_s, until_s)
        node_of = {one["rank"]: plan["hosts"][str(one["node"])] for one in plan["members"]}
        by_node: Counter[tuple[str, str]] = Counter()
        for event in filled:
            for giver, count in event["bytes_by_giver"]:
                by_node[node_of[giver], node_of[event["rank"]]] += count
        return Change(
            generation,
            dict(plan["axes"]),
            filled[0]["step"],
            plan["reason"],
            tuple(phases),
            dict(by_node),
            filled[0]["bytes_kept"],
            sum(event["bytes_from_disk"] for event in filled),
        )


def compare_losses(stories: Sequence[Story], reference: Story) -> float:
    """Largest difference between the loss curve of jobs that follow one another and an uninterrupted one."""
    losses = {step: loss for story in stories for step, loss in story.losses.items()}
    if losses.keys() != reference.losses.keys():
        missing = sorted(reference.losses.keys() ^ losses.keys())
        raise ValueError(f"comparing loss curves: steps {missing[:5]}... are in one of them only")
    return max(abs(loss - reference.losses[step]) for step, loss in losses.items())
