"""View of a job that the dashboard shows: its events, folded one after the other.

An event is a line of an event log: ``t`` (seconds since the epoch), ``who``, ``kind``, and values that depend on the
kind. Several processes log the same event (every agent logs a generation): the first one counts. A first generation of
other processes is a job that was started again with the same folder, as platforms do: curves, checkpoints and
happenings of the runs before stay. An unknown kind is shown in the list of happenings as it is, so that what a program
logs itself is seen too. Values come from files that any program may have written: what has another form is left out,
and counted.

Steps come from ``step`` events, which a program writes with ``job.log("step", loss=...)``: every number in it that is
not named in `_NOT_CURVES` becomes a curve. Memory is bounded for a job of any length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import Any

from remesh.dashboard.curve import Curve

Event = Mapping[str, Any]

_MAX_HAPPENINGS = 300
_MAX_GENERATIONS = 200
_MAX_CHECKPOINTS = 100
_MAX_CURVES = 12
_MAX_PAIRS = 256
_MAX_TEXT = 500
_MAX_ALIKE = 5
"""Events of an unknown kind, without a reason or a text, that are listed: what comes with every step is no news."""
_NOT_CURVES = {"t", "step", "generation", "rank", "samples"}
RATE = "steps per second"
"""Name of the curve that every job has."""


Process = tuple[str, int]
"""Its agent, as that calls itself, and its process id: in containers every node counts its processes from 1."""


@dataclass(slots=True)
class WorkerStory:
    """One process that trains, or did."""

    pid: int
    node: str
    slot: int
    """Its place on the node."""
    state: str = "starting"
    """``starting``, ``filling``, ``training``, ``left`` (its mesh is no more), ``standby``, ``done`` or ``gone``."""
    rank: int | None = None
    """In the mesh of now, also when it is gone from it; None outside."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """Where it stands on each axis."""
    step: int | None = None
    """Newest step that it reported."""
    seen_s: float = 0.0
    """When its last event was logged, seconds since the epoch."""


@dataclass(slots=True)
class GenerationStory:
    """One run on one mesh."""

    number: int
    axes: dict[str, int]
    num_workers: int
    step: int
    """At which it began."""
    reason: str
    began_s: float
    """When it was decided, seconds since the epoch."""
    first_step_s: float | None = None
    """When its first step was reported."""


@dataclass(slots=True)
class StateMove:
    """How the members of a generation got their state."""

    generation: int
    source: str
    """``peers``, ``checkpoint`` or ``fresh``."""
    reason: str
    seconds: float
    """On the slowest rank that has reported so far."""
    bytes_by_pair: list[list[int]]
    """``[giver, taker, bytes]`` by mesh rank, most bytes first. Invariant: at most _MAX_PAIRS."""
    bytes_moved: int
    """Between ranks, to all that have reported so far."""
    bytes_from_disk: int
    """Over all ranks that have reported so far."""


@dataclass(slots=True)
class Happening:
    """A line of the list of what happened."""

    at_s: float
    who: str
    kind: str
    text: str


@dataclass(slots=True)
class SavedStep:
    """A checkpoint that the job has saved."""

    step: int
    path: str
    seconds: float
    at_s: float


class Story:
    """Everything that is shown of a job; `take` adds an event."""

    def __init__(self) -> None:
        self.state = "waiting"
        """``waiting``, ``meeting``, ``running``, ``ended`` or ``failed``."""
        self.told = ""
        """Why it ended."""
        self.step: int | None = None
        self.newest_s: float | None = None
        """Time of the newest event, seconds since the epoch."""
        self.num_unreadable = 0
        """Events that did not have the form that their kind has."""
        self.workers: dict[Process, WorkerStory] = {}
        """By process id."""
        self.generations: deque[GenerationStory] = deque(maxlen=_MAX_GENERATIONS)
        self.moves: deque[StateMove] = deque(maxlen=_MAX_GENERATIONS)
        self.happenings: deque[Happening] = deque(maxlen=_MAX_HAPPENINGS)
        self.checkpoints: deque[SavedStep] = deque(maxlen=_MAX_CHECKPOINTS)
        self.curves: dict[str, Curve] = {}
        self.no_numbers: dict[str, int] = {}
        """Name of a curve -> step since which its values are infinite or NaN; gone once a number comes again."""
        """By name: `RATE`, and every number that steps report."""
        self._counted_once: set[tuple[str, int]] = set()
        self._first_members: list[tuple[Process, int, int]] = []
        """Of this run's first generation."""
        self._node_of: dict[str, str] = {}
        """Name of an agent's node."""
        self._started_by: dict[tuple[str, int], Process] = {}
        """Process that an agent has last started in a slot."""
        self._num_other: dict[str, int] = {}
        """How often each kind was seen that this module does not know."""
        self._stepped: tuple[int, float] | None = None
        """Newest step, and when it was first reported."""

    def take(self, event: Event) -> None:
        """One event more, in the order of their times."""
        try:
            self.newest_s = max(float(event["t"]), self.newest_s or 0.0)
            handle = _HANDLERS.get(str(event["kind"]), Story._on_other)
            handle(self, event)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
            self.num_unreadable += 1

    @property
    def generation(self) -> GenerationStory | None:
        """The newest one."""
        return self.generations[-1] if self.generations else None

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        current = self.generation
        return {
            "state": self.state,
            "told": self.told,
            "step": self.step,
            "newest_s": self.newest_s,
            "num_unreadable": self.num_unreadable,
            "axes": current.axes if current else {},
            "workers": [asdict(worker) for worker in sorted(self.workers.values(), key=_place_in_list)],
            "generations": [asdict(each) for each in self.generations],
            "moves": [asdict(each) for each in self.moves],
            "happenings": [asdict(each) for each in self.happenings],
            "checkpoints": [asdict(each) for each in self.checkpoints],
            "curves": {name: curve.points() for name, curve in self.curves.items()},
            "no_numbers": dict(self.no_numbers),
        }

    def _on_agent(self, event: Event) -> None:
        self._node_of[str(event["who"])] = str(event["node"])

    def _on_worker(self, event: Event) -> None:
        key = _who_of(event)
        worker = self.workers.setdefault(key, WorkerStory(key[1], "", int(event["slot"])))
        worker.node = str(event.get("node", worker.node))
        worker.seen_s = float(event["t"])

    def _on_meeting(self, event: Event) -> None:
        number = int(event["generation"])
        if self._is_new("meeting", number):
            self.state = "meeting"
            self._happen(event, f"members of generation {number} meet")

    def _on_generation(self, event: Event) -> None:
        number = int(event["number"])
        axes = {str(name): int(size) for name, size in event["axes"].items()}
        members = [(_member_of(m), int(m["rank"]), int(m["slot"])) for m in event["members"]]
        standby = [_member_of(m) for m in event.get("standby", ())]
        hosts = {str(index): str(name) for index, name in event.get("hosts", {}).items()}
        if number == 1 and members != self._first_members:
            self._begin_run(members, standby)
        if not self._is_new("generation", number):
            return
        step, at_s = int(event["step"]), float(event["t"])
        if self.step is not None and step < self.step:
            for curve in self.curves.values():
                curve.forget_after(step)
        self.step, self._stepped = step, None
        self.state = "running"
        self.generations.append(GenerationStory(number, axes, len(members), step, _text(event.get("reason", "")), at_s))
        for key, worker in self.workers.items():
            # A worker that is neither a member nor on standby did not come to the meeting.
            worker.state = "standby" if key in standby else "gone"
            worker.rank, worker.coordinates = None, {}
        for key, rank, slot in members:
            worker = self.workers.setdefault(key, WorkerStory(key[1], "", slot))
            worker.node = hosts.get(key[0], worker.node)
            worker.state, worker.rank, worker.seen_s = "filling", rank, at_s
            worker.coordinates = coordinates_of(rank, axes)
        mesh = " x ".join(f"{name}={size}" for name, size in axes.items())
        self._happen(event, f"generation {number} on {mesh} from step {step}: {event.get('reason', '')}")

    def _begin_run(self, members: list[tuple[Process, int, int]], standby: list[Process]) -> None:
        """The job was started; if not for the first time, processes of the run before are no part of it."""
        if self._first_members:
            self._counted_once = {("meeting", 1)}
            self.told = ""
            present = {*standby, *(key for key, *_ in members)}
            self.workers = {key: worker for key, worker in self.workers.items() if key in present}
        self._first_members = members

    def _on_round(self, event: Event) -> None:
        """Restart mode: all workers are started anew, in a row."""
        number, size, num_nodes = int(event["number"]), int(event["world_size"]), int(event["num_nodes"])
        if self.state in ("ended", "failed"):
            self._counted_once.clear()
        self.state, self.told = "running", ""
        for worker in self._workers_of(event):
            worker.state, worker.rank, worker.coordinates = "gone", None, {}
        if self._is_new("round", number):
            nodes = f"{num_nodes} node{'s' * (num_nodes > 1)}"
            reason = f"{size} workers on {nodes}, restarts left: {event['restarts_left']}"
            self.generations.append(
                GenerationStory(number, {"rank": size}, size, self.step or 0, reason, float(event["t"]))
            )
            self._happen(event, f"round {number}: {reason}")

    def _on_filled(self, event: Event) -> None:
        number, seconds = int(event["generation"]), float(event["seconds"])
        pairs = [[int(giver), int(event["rank"]), int(nbytes)] for giver, nbytes in event["bytes_by_giver"]]
        taken, from_disk = int(event["bytes_taken"]), int(event["bytes_from_disk"])
        worker = self._member(int(event["rank"]))
        if worker is not None:
            worker.state, worker.seen_s = "training", float(event["t"])
        if self._is_new("filled", number):
            source, reason = str(event["source"]), _text(event["reason"])
            self.moves.append(StateMove(number, source, reason, seconds, pairs, taken, from_disk))
            self._happen(event, f"state of generation {number} from {source}: {reason}")
        elif self.moves and self.moves[-1].generation == number:
            move = self.moves[-1]
            move.seconds = max(move.seconds, seconds)
            move.bytes_by_pair = nlargest(_MAX_PAIRS, [*move.bytes_by_pair, *pairs], key=itemgetter(2))
            move.bytes_moved += taken
            move.bytes_from_disk += from_disk

    def _on_step(self, event: Event) -> None:
        step, at_s = int(event["step"]), float(event["t"])
        current = self.generation
        if current is not None and int(event.get("generation", current.number)) != current.number:
            return  # a straggler of an earlier mesh: what it did is in the event of the generation
        worker = self._member(int(event["rank"])) if "rank" in event else None
        if worker is not None:
            worker.state, worker.step, worker.seen_s = "training", step, at_s
        if current is not None and current.first_step_s is None:
            current.first_step_s = at_s
        if self._stepped is None or step > self._stepped[0]:
            if self._stepped is not None and at_s > self._stepped[1]:
                self._curve(RATE).add(step, (step - self._stepped[0]) / (at_s - self._stepped[1]))
            self._stepped = (step, at_s)
            self.step = max(step, self.step or 0)
        for name, value in event.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_CURVES
            if is_number and (name in self.curves or len(self.curves) < _MAX_CURVES):
                self._add_to_curve(event, name, step, float(value))

    def _add_to_curve(self, event: Event, name: str, step: int, value: float) -> None:
        if math.isfinite(value):
            self.no_numbers.pop(name, None)
        elif name not in self.no_numbers:
            self.no_numbers[name] = step
            self._happen(event, f"{name} is {value}, not a number, at step {step}")
        self._curve(name).add(step, value)

    def _on_saved(self, event: Event) -> None:
        step, path, seconds = int(event["step"]), str(event["path"]), float(event["seconds"])
        known = self.checkpoints[-1] if self.checkpoints else None
        if known is not None and known.path == path:
            known.seconds = max(known.seconds, seconds)
            return
        self.checkpoints.append(SavedStep(step, path, seconds, float(event["t"])))
        self._happen(event, f"checkpoint of step {step} in {path}")

    def _on_left(self, event: Event) -> None:
        key = _who_of(event)
        if key in self.workers:
            self.workers[key].state, self.workers[key].seen_s = "left", float(event["t"])

    def _on_trouble(self, event: Event) -> None:
        if self._is_new(str(event["kind"]), int(event["generation"])):
            self._happen(event, str(event["reason"]))

    def _on_exited(self, event: Event) -> None:
        """In restart mode without a code: it ended well or was stopped, and failures have events of their own."""
        slot, code = int(event["slot"]), event.get("code")
        key = self._started_by.get((str(event["who"]), slot))
        worker = None if key is None else self.workers.get(key)
        if worker is not None and worker.state != "gone":
            worker.state = "gone" if code else "done"
        self._happen(event, f"worker {slot} ended" + ("" if code is None else f" with {code}"))

    def _on_failed(self, event: Event) -> None:
        pid, code = int(event["pid"]), int(event["exit_code"])
        if (key := _child_of(event)) in self.workers:
            self.workers[key].state = "gone"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        who = f"rank {event['rank']} (worker {event['local_rank']} of {event['node']}, pid {pid})"
        self._happen(event, f"{who} failed, {how}: {event['message']}")

    def _on_started(self, event: Event) -> None:
        key, slot, who = _child_of(event), int(event["slot"]), str(event["who"])
        self._started_by[who, slot] = key
        worker = self.workers.setdefault(
            key, WorkerStory(key[1], self._node_of.get(who, ""), slot, seen_s=float(event["t"]))
        )
        if "rank" in event:
            # Restart mode: no further event comes of it.
            worker.rank, worker.state = int(event["rank"]), "training"
            worker.coordinates = {"rank": worker.rank}

    def _on_finish(self, event: Event) -> None:
        for worker in self._workers_of(event):
            worker.state = worker.state if worker.state == "done" else "gone"
        if self.state not in ("ended", "failed"):
            self.state = "ended" if event["ok"] else "failed"
            self.told = _text(event["text"])
            self._happen(event, self.told)

    def _on_other(self, event: Event) -> None:
        kind = str(event["kind"])
        self._num_other[kind] = count = self._num_other.get(kind, 0) + 1
        text = event.get("reason", event.get("text"))
        if text is None:
            if count > _MAX_ALIKE:
                return
            values = {name: value for name, value in event.items() if name not in ("t", "who", "kind")}
            text = ", ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in values.items()
            )
        self._happen(event, str(text))

    def _happen(self, event: Event, text: str) -> None:
        self.happenings.append(Happening(float(event["t"]), _text(event["who"]), _text(event["kind"]), _text(text)))

    def _is_new(self, kind: str, number: int) -> bool:
        """Whether this is the first event of its kind and number; several processes log the same."""
        if (kind, number) in self._counted_once:
            return False
        self._counted_once.add((kind, number))
        return True

    def _workers_of(self, event: Event) -> list[WorkerStory]:
        """The workers that the agent which wrote this event started last."""
        mine = [key for (agent, _), key in self._started_by.items() if agent == str(event["who"])]
        return [self.workers[key] for key in mine if key in self.workers]

    def _member(self, rank: int) -> WorkerStory | None:
        return next((worker for worker in self.workers.values() if worker.rank == rank), None)

    def _curve(self, name: str) -> Curve:
        return self.curves.setdefault(name, Curve())


def coordinates_of(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """The coordinates of a mesh rank; the first axis is the outermost.

    >>> coordinates_of(5, {"dp": 4, "tp": 2})
    {'dp': 2, 'tp': 1}
    """
    found: dict[str, int] = {}
    for name in reversed(list(axes)):
        rank, found[name] = divmod(rank, axes[name])
    return {name: found[name] for name in axes}


def _place_in_list(worker: WorkerStory) -> tuple[bool, int, str, int]:
    return (worker.rank is None, worker.rank or 0, worker.node, worker.slot)


def _member_of(member: Mapping[str, Any]) -> Process:
    """The process of a member of a mesh."""
    return str(int(member["node"])), int(member["pid"])


def _child_of(event: Event) -> Process:
    """The process that an event of its agent is about."""
    return str(event["who"]).removeprefix("agent-"), int(event["pid"])


def _who_of(event: Event) -> Process:
    """The process of a worker that logged the event itself."""
    agent, _, pid = str(event["who"]).removeprefix("worker-").rpartition("-")
    return agent, int(pid)


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


_HANDLERS: Mapping[str, Callable[[Story, Event], None]] = {
    "agent": Story._on_agent,
    "worker": Story._on_worker,
    "worker-started": Story._on_started,
    "worker-exited": Story._on_exited,
    "worker-failed": Story._on_failed,
    "meeting": Story._on_meeting,
    "generation": Story._on_generation,
    "round": Story._on_round,
    "grown": lambda story, event: None,
    "filled": Story._on_filled,
    "step": Story._on_step,
    "saved": Story._on_saved,
    "left": Story._on_left,
    "broken": Story._on_trouble,
    "pause": Story._on_trouble,
    "finish": Story._on_finish,
}
"""What each kind does to the story; all others are listed as they are."""
