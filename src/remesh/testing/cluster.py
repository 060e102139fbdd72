"""A cluster in one thread: agents' machines, a store that is a dict, and workers that are counters.

Nothing is a process and no time passes by itself, so that thousands of failure stories run per second and every one can
be replayed from its seed. What is real is the protocol: :class:`remesh.elastic.membership.AgentMachine`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remesh.elastic.generation import Generation, WorkerReport
from remesh.elastic.machine_io import (
    Event,
    Finish,
    Instruction,
    KillWorker,
    LeaveAsked,
    NodeDead,
    Probe,
    Publish,
    StartWorker,
    Tell,
    Tick,
    WorkerDone,
    WorkerExited,
    WorkerLeft,
    WorkerReady,
    WorkerSuspects,
)
from remesh.elastic.membership import AgentMachine, AgentRules
from remesh.elastic.mesh_policy import make_template
from remesh.elastic.view import StoreReader

SIGKILL = 9
HEARTBEAT_S = 1.0
"""How long an agent may be silent before those who watch it think it dead."""


@dataclass
class FakeWorker:
    """A worker that counts steps instead of training."""

    pid: int
    slot: int
    step: int | None = None
    """Batches resolved in its state; None before it was filled."""
    in_doubt: bool = False
    generation: int = 0
    """The generation it trains in; 0 when it is in none."""
    paused: bool = False
    done: bool = False

    def report(self, template: dict[str, int]) -> WorkerReport:
        return WorkerReport(self.slot, self.pid, make_template(template).to_json(), self.step, self.in_doubt)


@dataclass
class FakeAgent:
    """A machine and its workers. ``alive`` is False once it was killed or has finished."""

    machine: AgentMachine
    workers: dict[int, FakeWorker] = field(default_factory=dict)
    alive: bool = True
    finish: Finish | None = None
    reader: StoreReader = field(default_factory=StoreReader)
    silent_since_s: float | None = None
    """When it was last seen to live, if it does not now: dead, or frozen."""
    frozen: bool = False


@dataclass
class FakeCluster:
    """All agents and their store. Every method is one thing that may happen."""

    rules: AgentRules
    template: dict[str, int]
    last_step: int
    """Workers are done after this many steps."""
    rng: random.Random
    store: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    agents: dict[int, FakeAgent] = field(default_factory=dict)
    now_s: float = 0.0
    num_steps: int = 0
    """Steps taken by all, over all generations."""
    _next_pid: int = 100

    def add_node(self) -> int:
        index = len(self.agents)
        agent = FakeAgent(AgentMachine(index, f"node-{index}", self.rules))
        self.agents[index] = agent
        info = {"index": index, "name": f"node-{index}", "address": "", "port": 0, "num_slots": self.rules.num_slots}
        self.store[f"nodes/{index}"] = info
        self._perform(agent, agent.machine.start(self.now_s))
        return index

    def look(self, index: int) -> None:
        """Agent ``index`` reads the store."""
        agent = self.agents[index]
        if agent.alive and not agent.frozen:
            self._feed(index, agent.reader.read(self, agent.machine.wants))

    def tick(self, index: int, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        agent = self.agents[index]
        for other in sorted(agent.machine.watched) if agent.alive and not agent.frozen else ():
            since_s = self.agents[other].silent_since_s
            if since_s is not None and self.now_s - since_s > HEARTBEAT_S:
                self._feed(index, NodeDead(other, "no heartbeat"))
        self._feed(index, Tick())

    def call_in(self, index: int) -> None:
        """The workers that this node has started are up."""
        for worker in list(self.agents[index].workers.values()):
            if worker.generation == 0 and worker.step is None and not worker.done:
                self._feed(index, WorkerReady(worker.report(self.template)))

    def train(self) -> None:
        """If all members of the newest generation are in it, they vote and take a step, or leave if one was paused."""
        members = self._members()
        if not members:
            return
        self._vote([worker for _, worker in members])
        for index, worker in members:
            self._after_vote(index, worker, paused=any(one.paused for _, one in members))

    def kill_worker_while_voting(self, index: int, slot: int) -> None:
        """A worker dies after all have voted: some survivors see the outcome, the others are in doubt."""
        worker = self.agents[index].workers.get(slot)
        members = self._members()
        if worker is None or all(one is not worker for _, one in members):
            self.kill_worker(index, slot)
            return
        survivors = [(at, one) for at, one in members if one is not worker]
        informed = [one for _, one in survivors if self.rng.random() < 0.5]
        self._vote(informed)
        self.kill_worker(index, slot)
        for at, one in survivors:
            if one in informed:
                self._lose_peer(at, one)
            elif self.agents[at].alive:
                one.in_doubt = True
                self._lose_peer(at, one)

    def kill_worker(self, index: int, slot: int) -> None:
        agent = self.agents[index]
        if agent.alive and not agent.frozen and slot in agent.workers:
            del agent.workers[slot]
            self._feed(index, WorkerExited(slot, -SIGKILL))
            self._break_collectives()

    def preempt_node(self, index: int) -> None:
        self._feed(index, LeaveAsked("pre-empted"))

    def freeze_node(self, index: int) -> None:
        """It stands still with its workers, as under SIGSTOP or behind a cut link: no answer comes, nor a refusal."""
        agent = self.agents[index]
        if agent.alive and not agent.frozen:
            agent.frozen, agent.silent_since_s = True, self.now_s

    def thaw_node(self, index: int) -> None:
        """It goes on as if nothing had been."""
        agent = self.agents[index]
        if agent.frozen:
            agent.frozen, agent.silent_since_s = False, None
            for worker in list(agent.workers.values()):
                if worker.generation and worker.generation != len(self.generations()):
                    self._lose_peer(index, worker)

    def kill_node(self, index: int) -> None:
        self.agents[index].alive, self.agents[index].silent_since_s = False, self.now_s
        self.agents[index].workers.clear()
        self._break_collectives()

    def settle(self, num_rounds: int = 400) -> None:
        """Let everybody act fairly until all agents have finished, or give up after ``num_rounds``."""
        for _ in range(num_rounds):
            alive = [index for index, agent in self.agents.items() if agent.alive]
            if not alive:
                return
            for index in alive:
                self.call_in(index)
                self.look(index)
                self.tick(index, 0.1)
            self.train()
            self._break_collectives()

    def generations(self) -> list[Generation]:
        """All that were decided, in order."""
        found: list[Generation] = []
        while (plan := self.store.get(f"gen/{len(found) + 1}/plan")) is not None:
            found.append(Generation.from_json(plan))
        return found

    # --- how the cluster reacts ---

    def _members(self) -> list[tuple[int, FakeWorker]]:
        """The newest generation's placed workers if all of them are alive, in it and undisturbed; else nothing."""
        plans = self.generations()
        if not plans:
            return []
        found = []
        for member in plans[-1].members:
            agent = self.agents[member.node]
            worker = None if agent.frozen else agent.workers.get(member.slot)
            if worker is None or worker.pid != member.pid or worker.generation != plans[-1].number or worker.done:
                return []
            found.append((member.node, worker))
        return found

    def _vote(self, informed: list[FakeWorker]) -> None:
        steps = {worker.step for worker in informed}
        assert len(steps) <= 1, f"ranks of one generation stand at different steps {steps}"
        for worker in informed:
            assert worker.step is not None
            worker.step += 1
            self.num_steps = max(self.num_steps, worker.step)

    def _after_vote(self, index: int, worker: FakeWorker, *, paused: bool) -> None:
        generation = worker.generation
        if paused:
            worker.generation, worker.paused = 0, False
            self._feed(index, WorkerLeft(worker.report(self.template)))
        elif worker.step is not None and worker.step >= self.last_step:
            worker.done = True
            self._feed(index, WorkerDone(generation, worker.report(self.template)))

    def _break_collectives(self) -> None:
        """Members of a generation that has lost one notice, in any order."""
        plans = self.generations()
        if not plans or self._members():
            return
        gone = any(
            (worker := self.agents[member.node].workers.get(member.slot)) is None or worker.pid != member.pid
            for member in plans[-1].members
        )
        if gone:
            for index, agent in self.agents.items():
                for worker in list(agent.workers.values()):
                    if agent.alive and not agent.frozen and worker.generation == plans[-1].number and not worker.done:
                        self._lose_peer(index, worker)

    def _lose_peer(self, index: int, worker: FakeWorker) -> None:
        generation, worker.generation, worker.paused = worker.generation, 0, False
        if generation:
            self._feed(index, WorkerSuspects(worker.slot, generation, "connection closed by peer"))
            self._feed(index, WorkerLeft(worker.report(self.template)))

    def get(self, key: str) -> Mapping[str, Any] | None:
        """For readers: the value of a key."""
        return self.store.get(key)

    def count(self, key: str) -> int:
        """For readers: how many nodes have registered."""
        assert key == "nodes/count"
        return len(self.agents)

    def _feed(self, index: int, event: Event) -> None:
        agent = self.agents[index]
        if agent.alive and not agent.frozen:
            self._perform(agent, agent.machine.handle(event, self.now_s))

    def _perform(self, agent: FakeAgent, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Publish(key, value, once):
                    if not (once and key in self.store):
                        self.store[key] = value
                case StartWorker(slot):
                    self._next_pid += 1
                    agent.workers[slot] = FakeWorker(self._next_pid, slot)
                case KillWorker(slot, _):
                    if slot in agent.workers:
                        del agent.workers[slot]
                        self._feed(agent.machine.index, WorkerExited(slot, -SIGKILL))
                case Probe(indices):
                    for dead in indices:
                        # One that is frozen takes connections: that proves nothing.
                        if not self.agents[dead].alive:
                            self._feed(agent.machine.index, NodeDead(dead, "refuses connections"))
                case Tell(slot, message):
                    self._tell(agent, slot, message)
                case Finish():
                    agent.finish, agent.alive = instruction, False
                case _:
                    pass

    def _tell(self, agent: FakeAgent, slot: int, message: Mapping[str, Any]) -> None:
        worker = agent.workers.get(slot)
        if worker is None:
            return
        if message["do"] == "meet":
            if message.get("forget"):
                worker.step = None
            self._fill(worker, Generation.from_json(message["plan"]))
        elif message["do"] == "pause":
            worker.paused = worker.generation == message["generation"]
        elif message["do"] == "break" and worker.generation == message["generation"]:
            self._lose_peer(agent.machine.index, worker)
        elif message["do"] == "exit":
            del agent.workers[slot]
            self._feed(agent.machine.index, WorkerExited(slot, 0))

    def _fill(self, worker: FakeWorker, plan: Generation) -> None:
        """A worker enters a generation: in doubt it follows the decision, empty or behind it is filled by others."""
        if worker.step is not None:
            assert worker.step <= plan.step, f"worker {worker.pid} at step {worker.step} was sent back to {plan.step}"
        worker.step, worker.in_doubt, worker.generation, worker.done = plan.step, False, plan.number, False
