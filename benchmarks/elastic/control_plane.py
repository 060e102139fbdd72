"""Cost of agreement in a large job: the agents' own state machines, thousands of them in one thread.

What is real: :class:`AgentMachine`, :class:`StoreReader` and the pure decision; every read and write of the store is
counted, as is every message between an agent and its worker, and every connection made to see whether a node lives.
What is not: agents act in lockstep, once per tick, a worker is a number of steps, and what agents know of each other is
made once for all (16,384 of them would hold 268 million nodes) and timed by itself. A step's vote is an all-reduce
among workers and costs agents nothing; what it costs when a worker dies in it is a case here.

An *event* runs from what happens until every living agent is in the generation that follows from it.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.report import Row, at_most
from remesh.elasticity.membership.instructions import (
    Event,
    Instruction,
    KillWorker,
    NodeDead,
    Probe,
    Publish,
    StartWorker,
    Tell,
    Tick,
    Wake,
    WorkerExited,
    WorkerLeft,
    WorkerReady,
    WorkerSuspects,
)
from remesh.elasticity.membership.membership_machine import AgentMachine
from remesh.elasticity.membership.phases import Phase
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.membership.view import StoreReader
from remesh.elasticity.model.generation import Generation, MeetingRules, NodeInfo, WorkerReport
from remesh.elasticity.model.mesh_policy import make_template
from remesh.foundation.collector import collector_at_rest

SIZES = (16, 64, 256, 1024, 4096, 16384)
QUICK_SIZES = (16, 64, 256, 1024)
GOAL_EXPONENT = 1.1
"""Near-linear: messages grow at most like the number of agents to this power, over a factor of 4."""
GOAL_DECISION = 1.25
"""The same for the processor time of a decision, from 256 agents on: it sorts."""
TICK_S, BEAT_S, POLLS_PER_S = 0.01, 0.5, 100
MAX_ROUNDS = 400
TEMPLATE = make_template({"dp": -1}).to_json()
SIGKILL = 9


@dataclass(frozen=True, slots=True)
class Cost:
    """What one event cost a job."""

    event: str
    num_agents: int
    messages: int
    """Reads and writes of the store, messages to and from workers, connections; of all agents together."""
    stored_bytes: int
    """Bytes read from and written to the store."""
    decision_s: float
    """Processor time of the longest single turn of a machine: the leader's, which decides."""
    others_s: float
    """Mean processor time of all turns of one agent."""
    num_rounds: int
    """Ticks until everybody was there."""


class CountingStore:
    """A dictionary that counts; written values are kept as objects, and weighed as JSON."""

    def __init__(self) -> None:
        self.values: dict[str, Mapping[str, Any]] = {}
        self.num_nodes = 0
        self.rings = 0
        self.counts: Counter[str] = Counter()
        self._bytes: dict[str, int] = {}

    def get(self, key: str) -> Mapping[str, Any] | None:
        self.counts["read"] += 1
        value = self.values.get(key)
        if value is not None:
            self.counts["bytes"] += self._bytes[key]
        return value

    def get_all(self, keys: Sequence[str]) -> list[Mapping[str, Any] | None]:
        self.counts["read"] += bool(keys)
        self.counts["bytes"] += self.weigh(keys)
        return [self.values.get(key) for key in keys]

    def count_get_all(self, num_bytes: int) -> None:
        """As `get_all`, by one who has the values already."""
        self.counts["read"] += bool(num_bytes)
        self.counts["bytes"] += num_bytes

    def weigh(self, keys: Iterable[str]) -> int:
        """Bytes of these values."""
        return sum(self._bytes.get(key, 0) for key in keys)

    def count(self, key: str) -> int:
        assert key == "nodes/count"
        self.counts["read"] += 1
        return self.num_nodes

    def put(self, key: str, value: Mapping[str, Any], *, once: bool) -> None:
        self.counts["written"] += 2  # the value, and the bell
        self.rings += 1
        if not (once and key in self.values):
            self.values[key] = value
            self._bytes[key] = len(json.dumps(value))
            self.counts["bytes"] += self._bytes[key]


@dataclass
class SharingReader(StoreReader):
    """Reads what every agent reads, and counts it; what it knows of nodes, all of them know.

    A leader, who has read them one by one before, is counted once too often.
    """

    weights: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes of the nodes that are new in one plan to those who know another, by the numbers of both; shared."""

    def _read_members(self, keys: CountingStore, plan: Generation) -> None:  # type: ignore[override]
        known, self._members_of = self._members_of, plan
        if plan is known:
            return
        step = (0 if known is None else known.number, plan.number)
        if step not in self.weights:
            unknown = plan.nodes if known is None else plan.nodes - known.nodes
            self.weights[step] = keys.weigh(f"nodes/{index}" for index in unknown)
            for index in plan.nodes - self.nodes.keys():
                self.nodes[index] = NodeInfo(**keys.values[f"nodes/{index}"])
        keys.count_get_all(self.weights[step])


@dataclass
class SimAgent:
    """An agent with one worker."""

    machine: AgentMachine
    reader: StoreReader
    heard: int = -1
    """Rings of the bell that it has acted on."""
    pid: int = 0
    step: int | None = None
    in_doubt: bool = False
    generation: int = 0
    """The one its worker trains in; 0 for none."""
    alive: bool = True
    seconds: float = 0.0

    def report(self) -> WorkerReport:
        return WorkerReport(0, self.pid, TEMPLATE, self.step, self.in_doubt)


@dataclass
class ControlPlane:
    """All agents and their store."""

    num_agents: int
    store: CountingStore = field(default_factory=CountingStore)
    agents: list[SimAgent] = field(default_factory=list)
    now_s: float = 0.0
    longest_s: float = 0.0
    _pids: int = 0
    _decoded: dict[int, Generation] = field(default_factory=dict)
    _nodes: dict[int, NodeInfo] = field(default_factory=dict)
    _weights: dict[tuple[int, int], int] = field(default_factory=dict)
    _ready: list[SimAgent] = field(default_factory=list)
    """Agents whose workers have just started."""

    def __post_init__(self) -> None:
        meeting = MeetingRules(1, self.num_agents, last_call_s=30.0, join_timeout_s=600.0, absence_timeout_s=20.0)
        self._rules = AgentRules(1, 1, meeting, leave_timeout_s=10.0, exit_timeout_s=5.0)

    def events(self) -> Iterator[Cost]:
        """One event after the other, in one job."""
        yield self._measure("first meeting", lambda: [self.add_agent() for _ in range(self.num_agents)])
        yield self._measure("worker dies and is replaced", lambda: self.kill_worker(self.num_agents // 2))
        yield self._measure("worker dies in a vote", lambda: self.kill_worker(self.num_agents // 3, doubt=True))
        yield self._measure("node dies", lambda: self.kill_agent(self.num_agents - 1))
        yield self._measure("node joins", self.add_agent)
        yield self._measure("first node dies, leader too", self.kill_leader)

    # --- what happens ---

    def add_agent(self) -> None:
        index = len(self.agents)
        reader = SharingReader(decode=self._decode, nodes=self._nodes, weights=self._weights)
        agent = SimAgent(AgentMachine(index, f"node-{index}", self._rules), reader)
        self.agents.append(agent)
        info = {"index": index, "name": f"node-{index}", "address": "10.0.0.1", "port": 40000, "num_slots": 1}
        self.store.put(f"nodes/{index}", {**info, "snapshot_port": 40001}, once=False)
        self.store.num_nodes += 1
        self._perform(agent, agent.machine.start(self.now_s))

    def kill_worker(self, index: int, *, doubt: bool = False) -> None:
        """Its ring neighbours notice at once; in a vote, every other survivor has seen the outcome."""
        agent = self.agents[index]
        agent.generation, agent.step = 0, None
        if doubt:
            for other in self._training():
                other.in_doubt = other.machine.index % 2 == 0
                other.step = (other.step or 0) + (not other.in_doubt)
        self._feed(agent, WorkerExited(0, -SIGKILL))
        for other in (self.agents[index - 1], self.agents[(index + 1) % len(self.agents)]):
            self._lose_peer(other)

    def kill_agent(self, index: int) -> None:
        self.agents[index].alive = False
        for neighbour in (index - 1, (index + 1) % len(self.agents)):
            self._lose_peer(self.agents[neighbour])

    def kill_leader(self) -> None:
        """The first node dies, and then the first node at the meeting."""
        self.kill_agent(min(agent.machine.index for agent in self.agents if agent.alive))
        while (lead := self.store.values.get(f"gen/{self._number + 1}/lead/0")) is None:
            self._round()
        self.agents[int(lead["node"])].alive = False

    # --- how it goes on ---

    def _measure(self, event: str, happen: Callable[[], object]) -> Cost:
        self.store.counts.clear()
        self.longest_s = 0.0
        for agent in self.agents:
            agent.seconds = 0.0
        happen()
        rounds = 0
        while not self._is_calm():
            rounds += 1
            assert rounds < MAX_ROUNDS, f"{event}: not settled after {rounds} ticks"
            self._round()
        counts = self.store.counts
        messages = counts["read"] + counts["written"] + counts["worker"] + counts["connection"]
        mean_s = sum(agent.seconds for agent in self.agents) / len(self.agents)
        return Cost(event, self.num_agents, messages, counts["bytes"], self.longest_s, mean_s, rounds)

    def _round(self) -> None:
        self.now_s += TICK_S
        for agent in self._training():
            # Time for a step: those who were asked to pause leave after it.
            if agent.machine._view is not None and agent.machine._view.pause is not None:
                agent.step = (agent.step or 0) + 1
                self._leave(agent)
        ready, self._ready = self._ready, []
        for agent in ready:
            if agent.alive:
                self._feed(agent, WorkerReady(agent.report()))
        rung = self.store.rings
        for agent in self.agents:
            if not agent.alive:
                continue
            self.store.counts["read"] += 1  # the bell
            if agent.heard < rung:
                agent.heard = rung
                started_s = time.process_time()
                view = agent.reader.read(self.store, agent.machine.wants)
                agent.seconds += time.process_time() - started_s
                self._feed(agent, view)
            else:
                self._feed(agent, Tick())

    def _is_calm(self) -> bool:
        """Everybody alive trains in the newest generation, and nobody has anything to hear."""
        rung = self.store.rings
        return not self._ready and all(
            agent.generation == self._number and agent.heard == rung for agent in self.agents if agent.alive
        )

    @property
    def _number(self) -> int:
        return max(self._decoded, default=0)

    def _training(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.alive and agent.generation]

    def _decode(self, value: Mapping[str, Any]) -> Generation:
        """Once for all: reading a plan is timed by itself."""
        number = value["number"]
        if number not in self._decoded:
            self._decoded[number] = Generation.from_json(value)
        return self._decoded[number]

    def _feed(self, agent: SimAgent, event: Event) -> None:
        if isinstance(event, WorkerReady | WorkerLeft | WorkerSuspects):
            self.store.counts["worker"] += 1
        started_s = time.process_time()
        instructions = agent.machine.handle(event, self.now_s)
        turn_s = time.process_time() - started_s
        agent.seconds += turn_s
        self.longest_s = max(self.longest_s, turn_s)
        self._perform(agent, instructions)

    def _perform(self, agent: SimAgent, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Publish(key, value, once):
                    self.store.put(key, value, once=once)
                case StartWorker():
                    self._pids += 1
                    agent.pid, agent.step, agent.generation = self._pids, None, 0
                    self._ready.append(agent)
                case Probe(indices):
                    self.store.counts["connection"] += len(indices)
                    for index in indices:
                        if not self.agents[index].alive:
                            self._feed(agent, NodeDead(index, "refuses connections"))
                case Wake(indices):
                    self.store.counts["connection"] += len(indices)
                case Tell(_, message):
                    self.store.counts["worker"] += 1
                    self._tell(agent, message)
                case KillWorker():
                    raise AssertionError("nobody is killed for being slow here")
                case _:
                    pass

    def _tell(self, agent: SimAgent, message: Mapping[str, Any]) -> None:
        if message["type"] == "meet":
            agent.generation, agent.in_doubt = message["plan"]["number"], False
            agent.step = message["plan"]["step"]
        elif message["type"] == "break":
            self._lose_peer(agent)

    def _lose_peer(self, agent: SimAgent) -> None:
        if agent.alive and agent.generation:
            self._feed(agent, WorkerSuspects(0, agent.generation, "connection closed by peer"))
            self._leave(agent)

    def _leave(self, agent: SimAgent) -> None:
        if agent.generation:
            agent.generation = 0
            self._feed(agent, WorkerLeft(agent.report()))

    def count_idle_per_s(self) -> float:
        """Store operations per second and agent while nothing happens: the bell, hearts, health."""
        hearts = sum(1 + len(agent.machine.watched) for agent in self.agents if agent.alive) / BEAT_S
        assert all(agent.machine.phase is Phase.RUNNING for agent in self.agents if agent.alive)
        num_alive = sum(agent.alive for agent in self.agents)
        return POLLS_PER_S + (hearts + num_alive / 0.25) / num_alive


# A search for garbage would look through all agents, where a real one has its own only.
@collector_at_rest()
def measure(num_agents: int) -> tuple[list[Cost], float, float]:
    """The cost of each event, store operations per second and agent of a quiet job, seconds to read a plan
    and who its nodes are."""
    plane = ControlPlane(num_agents)
    costs = list(plane.events())
    plan = plane._decoded[plane._number]
    text = json.dumps([plan.to_json(), [asdict(plane._nodes[index]) for index in plan.nodes]])
    started_s = time.process_time()
    told, infos = json.loads(text)
    Generation.from_json(told), [NodeInfo(**info) for info in infos]
    return costs, plane.count_idle_per_s(), time.process_time() - started_s


def rows(*, quick: bool) -> list[Row]:
    """For each size and event: messages per agent and the decision's time; and how they grow with the size."""
    found: list[Row] = []
    by_event: dict[str, list[Cost]] = {}
    for num_agents in QUICK_SIZES if quick else SIZES:
        costs, idle_per_s, read_s = measure(num_agents)
        for cost in costs:
            by_event.setdefault(cost.event, []).append(cost)
            about = f"control plane, {num_agents} agents, {cost.event}"
            found += [
                Row(f"{about}: messages per agent", cost.messages / num_agents, "messages"),
                Row(f"{about}: stored bytes per agent", cost.stored_bytes / num_agents, "bytes"),
                Row(f"{about}: decision", cost.decision_s, "s"),
                Row(f"{about}: an agent's turns", cost.others_s, "s"),
            ]
        about = f"control plane, {num_agents} agents"
        found.append(Row(f"{about}: quiet job, store operations per agent", idle_per_s, "per s"))
        found.append(Row(f"{about}: an agent reads a plan and its nodes", read_s, "s"))
    for event, costs in by_event.items():
        worst = max(_exponent(before.messages, after.messages, before, after) for before, after in pairwise(costs))
        found.append(
            at_most(f"control plane, {event}: growth of messages", worst, "exponent", GOAL_EXPONENT, bound=1.0)
        )
        # Small decisions are shorter than the clock's step.
        large = [cost for cost in costs if cost.num_agents >= 256]
        if len(large) > 1:
            slow = _exponent(large[0].decision_s, large[-1].decision_s, large[0], large[-1])
            about = f"control plane, {event}: growth of the decision"
            found.append(at_most(about, slow, "exponent", GOAL_DECISION, bound=1.0))
    return found


def _exponent(value: float, later: float, before: Cost, after: Cost) -> float:
    return math.log(later / value) / math.log(after.num_agents / before.num_agents)
