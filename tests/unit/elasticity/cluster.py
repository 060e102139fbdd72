"""A cluster in one thread: agents' machines, stores that are dicts, and workers that are counters.

Nothing is a process and no time passes by itself, so that thousands of failure stories run per second and every one can
be replayed from its seed. What is real is the protocol:
:class:`remesh.elasticity.membership.membership_machine.AgentMachine`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remesh.elasticity.membership.instructions import (
    Event,
    Finish,
    Instruction,
    KillWorker,
    LeaveAsked,
    NodeDead,
    Note,
    Probe,
    Publish,
    StartWorker,
    StoreMoved,
    StragglerFound,
    Tell,
    Tick,
    Wake,
    WorkerDone,
    WorkerExited,
    WorkerLeft,
    WorkerReady,
    WorkerStepped,
    WorkerSuspects,
)
from remesh.elasticity.membership.membership_machine import AgentMachine
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.failover import (
    REFUSED,
    SILENT,
    Answer,
    Base,
    Join,
    Open,
    Opening,
    Place,
    Register,
    Standby,
    decide_move,
)
from remesh.elasticity.model.generation import Generation
from tests.unit.elasticity.cluster_parts import FakeAgent, FakeStore, FakeWorker

SIGKILL = 9
HEARTBEAT_S = 1.0
"""How long an agent may be silent before those who watch it think it dead."""


@dataclass
class FakeCluster:
    """All agents and their stores. Every method is one thing that may happen."""

    rules: AgentRules
    template: dict[str, int]
    last_step: int
    """Workers are done after this many steps."""
    rng: random.Random
    first_host: int | None = None
    """Node whose agent hosts the first store; None for a host that is no node, on side 0."""
    first: FakeStore = field(default_factory=lambda: FakeStore(opening=Opening()))
    agents: dict[int, FakeAgent] = field(default_factory=dict)
    now_s: float = 0.0
    notes: list[Note] = field(default_factory=list)
    """What agents wrote to their logs, in order."""
    woken: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Who woke whom."""
    num_steps: int = 0
    """Steps taken by all, over all generations."""
    _stepped: list[Generation] = field(default_factory=list)
    """Generations that took steps, in the order of their first."""

    def add_node(self) -> int:
        index = len(self.agents)
        agent = FakeAgent(AgentMachine(index, f"node-{index}", self.rules), self.first)
        self.agents[index] = agent
        if self.first_host == index:
            agent.standby = self.first
        opened = [store for store in self._stores() if self._reaches(agent, store)]
        agent.store = max(opened, key=_place_of, default=self.first)
        assert agent.store.opening is not None
        agent.reader.opening = agent.store.opening
        agent.store.keys[f"nodes/{index}"] = self._info(index)
        self._perform(agent, agent.machine.start(self.now_s))
        return index

    def look(self, index: int) -> None:
        """Agent ``index`` reads the store, or looks for another one."""
        agent = self.agents[index]
        if not agent.alive or agent.frozen:
            return
        later = [store for store in self._stores() if self._reaches(agent, store) and store is not agent.store]
        if not self._reaches(agent, agent.store):
            self._search(index)
        elif later and _place_of(max(later, key=_place_of)) > _place_of(agent.store):
            # Whoever hosts a later place tells all earlier ones that it can reach.
            self._join(agent, max(later, key=_place_of))
        else:
            self._feed(index, agent.reader.read(agent.store, agent.machine.wants))

    def tick(self, index: int, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        if self._reaches(self.agents[index], self.agents[index].store):
            self._listen(self.agents[index])
        self._feed(index, Tick())

    def call_in(self, index: int) -> None:
        """The workers that this node has started are up."""
        for worker in list(self.agents[index].workers.values()):
            if worker.generation == 0 and worker.step is None and not worker.done:
                self._feed(index, WorkerReady(worker.report(self.template)))

    def train(self) -> None:
        """If all members of the newest generation are in it, they vote and take a step, or leave if one was paused."""
        for plan in self._present():
            if members := self._members(plan):
                self._vote([worker for _, worker in members], plan)
                for index, worker in members:
                    self._after_vote(index, worker, paused=any(one.paused for _, one in members))

    def kill_worker_while_voting(self, index: int, slot: int) -> None:
        """A worker dies after all have voted: some survivors see the outcome, the others are in doubt."""
        worker = self.agents[index].workers.get(slot)
        members = self._members(worker.plan) if worker is not None and worker.plan is not None else []
        if worker is None or all(one is not worker for _, one in members):
            self.kill_worker(index, slot)
            return
        survivors = [(at, one) for at, one in members if one is not worker]
        informed = [one for _, one in survivors if self.rng.random() < 0.5]
        self._vote(informed, worker.plan)
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

    def find_straggler(self, index: int, slot: int, ratio: float) -> None:
        """The first node finds a worker slower than the others, and its node hears of it."""
        plan = self.generations()[-1]
        ranks = [one.rank for one in plan.of_node(index) if one.slot == slot and one.rank >= 0]
        for rank in ranks:
            self._feed(index, StragglerFound(plan.number, rank, ratio, f"found at step {self.num_steps}"))

    def freeze_node(self, index: int) -> None:
        """It stands still with its workers, as under SIGSTOP: no answer comes, nor a refusal."""
        self.agents[index].frozen = self.agents[index].alive

    def thaw_node(self, index: int) -> None:
        """It goes on as if nothing had been."""
        agent = self.agents[index]
        if agent.frozen:
            agent.frozen = False
            for worker in list(agent.workers.values()):
                if worker.plan is not None and worker.plan != self.generations()[-1]:
                    self._lose_peer(index, worker)

    def kill_node(self, index: int, *, is_silent: bool = False) -> None:
        """``is_silent``: as when power is lost, so that not even its kernel answers."""
        self.agents[index].alive = False
        self.agents[index].is_silent = is_silent
        self.agents[index].workers.clear()
        self._break_collectives()

    def cut(self, sides: Mapping[int, int]) -> None:
        """Divide the network; nodes that are not named are on side 0, as is a store that no node hosts."""
        for index, agent in self.agents.items():
            agent.side = sides.get(index, 0)
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

    def run_until_step(self, num_steps: int, within_s: float = 1000.0) -> None:
        """Let everybody act fairly until so many steps are taken."""
        while self.num_steps < num_steps:
            self.settle(1)
            assert self.now_s < within_s, f"the job makes no progress at step {self.num_steps}"

    def generations(self) -> list[Generation]:
        """All that were decided, in order."""
        known = {plan.number: plan for store in sorted(self._stores(), key=_place_of) for plan in store.plans()}
        return [known[number] for number in sorted(known)]

    # --- how the cluster reacts ---

    def _listen(self, agent: FakeAgent) -> None:
        """To the heartbeats of those that an agent watches."""
        watched = agent.machine.watched
        agent.unheard_since_s = {at: since_s for at, since_s in agent.unheard_since_s.items() if at in watched}
        for other in sorted(watched):
            if isinstance(self._ask(agent, other), Standby):
                agent.unheard_since_s.pop(other, None)
            elif self.now_s - agent.unheard_since_s.setdefault(other, self.now_s) > HEARTBEAT_S:
                self._feed(agent.machine.index, NodeDead(other, "no heartbeat", is_certain=False))

    def _present(self) -> list[Generation]:
        """Generations that some worker is in."""
        found: list[Generation] = []
        for agent in self.agents.values():
            for worker in agent.workers.values():
                if worker.plan is not None and worker.plan not in found:
                    found.append(worker.plan)
        return found

    def _members(self, plan: Generation) -> list[tuple[int, FakeWorker]]:
        """A generation's workers if all are alive, in it, undisturbed, not cut off, and have met; else nothing."""
        found = []
        for member in plan.members:
            agent = self.agents[member.node]
            worker = None if agent.frozen else agent.workers.get(member.slot)
            if worker is None or worker.pid != member.pid or worker.plan != plan or worker.done:
                return []
            found.append((member.node, worker))
        have_met = len({id(worker.met_in) for _, worker in found}) == 1
        return found if have_met and len({self.agents[index].side for index, _ in found}) == 1 else []

    def _vote(self, informed: list[FakeWorker], plan: Generation | None) -> None:
        assert plan is not None
        if informed and plan not in self._stepped:
            self._stepped.append(plan)
        assert not informed or plan == self._stepped[-1], f"two jobs: {plan.number} and {self._stepped[-1].number}"
        steps = {worker.step for worker in informed}
        assert len(steps) <= 1, f"ranks of one generation stand at different steps {steps}"
        for worker in informed:
            assert worker.step is not None
            worker.step += 1
            self.num_steps = max(self.num_steps, worker.step)

    def _after_vote(self, index: int, worker: FakeWorker, *, paused: bool) -> None:
        generation = worker.generation
        self._see_step(index, worker)
        self._feed(index, WorkerStepped(worker.step or 0))
        if paused:
            worker.plan, worker.paused = None, False
            self._feed(index, WorkerLeft(worker.report(self.template)))
        elif worker.step is not None and worker.step >= self.last_step:
            worker.done = True
            self._feed(index, WorkerDone(generation, worker.report(self.template)))

    def _break_collectives(self) -> None:
        """Members of a generation that has lost one notice, in any order."""
        for plan in self._present():
            nodes = [self.agents[member.node] for member in plan.members]
            gone = any(
                (worker := self.agents[member.node].workers.get(member.slot)) is None or worker.pid != member.pid
                for member in plan.members
            )
            if not gone and len({agent.side for agent in nodes}) == 1:
                continue
            for index, agent in self.agents.items():
                for worker in list(agent.workers.values()):
                    if agent.alive and not agent.frozen and worker.plan == plan and not worker.done:
                        self._lose_peer(index, worker)

    def _lose_peer(self, index: int, worker: FakeWorker) -> None:
        generation, worker.plan, worker.paused, worker.is_leaving = worker.generation, None, False, False
        if generation:
            self._see_step(index, worker)
            self._feed(index, WorkerSuspects(worker.slot, generation, "connection closed by peer"))
            self._feed(index, WorkerLeft(worker.report(self.template)))

    def _see_step(self, index: int, worker: FakeWorker) -> None:
        agent = self.agents[index]
        if agent.alive and not agent.frozen:
            agent.seen_step = max(agent.seen_step, worker.step or 0)

    def _check_known_step(self, plan: Generation) -> None:
        """A plan knows of every step that an agent which takes part in it was told of."""
        told = max((self.agents[index].seen_step for index in plan.nodes), default=0)
        assert told <= plan.known_step <= self.num_steps, f"{plan.number} knows of {plan.known_step}, told {told}"

    # --- stores ---

    def _stores(self) -> list[FakeStore]:
        """All that were opened."""
        own = [agent.standby for agent in self.agents.values() if agent.standby is not self.first]
        return [self.first, *(store for store in own if store.opening is not None)]

    def _host_of(self, store: FakeStore) -> FakeAgent | None:
        return next((agent for agent in self.agents.values() if agent.standby is store), None)

    def _reaches(self, agent: FakeAgent, store: FakeStore) -> bool:
        host = self._host_of(store)
        if host is None:
            return agent.side == 0 and self.first_host is None
        # An agent that has finished stays until all have heard of it.
        return (host.alive or host.finish is not None) and not host.frozen and host.side == agent.side

    def _search(self, index: int) -> None:
        """One round of looking for another store."""
        agent = self.agents[index]
        last = agent.reader.plan
        if last is None:
            agent.alive = False
            return
        base = Base(tuple(last.nodes), last.place)
        answers: dict[int, Answer] = {node: self._ask(agent, node) for node in self.agents}
        match decide_move(index, agent.store.place, [base], old_answers=False, answers=answers):
            case Join(later):
                self._join(agent, next(store for store in self._stores() if store.place == later))
            case Register(host):
                self._bring(agent, self.agents[host].standby)
                self.agents[host].standby.movers.add(index)
            case Open(later):
                store = self.agents[later.host].standby
                known = tuple(sorted(agent.reader.nodes))
                store.opening = store.opening or Opening(later, last.number, known, first_index=len(self.agents))

    def _ask(self, agent: FakeAgent, node: int) -> Answer:
        other = self.agents[node]
        if other.side != agent.side or other.frozen or (not other.alive and other.is_silent):
            return SILENT
        if not other.alive:
            return REFUSED
        own = other.standby
        return Standby(None if own.opening is None else own.place, frozenset(own.movers))

    def _join(self, agent: FakeAgent, store: FakeStore) -> None:
        self._bring(agent, store)
        agent.store = store
        assert store.opening is not None
        agent.reader.move(store, store.opening)
        self._perform(agent, agent.machine.handle(StoreMoved(), self.now_s))

    def _bring(self, agent: FakeAgent, store: FakeStore) -> None:
        for index in agent.reader.nodes:
            store.keys.setdefault(f"nodes/{index}", self._info(index))
        if (last := agent.reader.plan) is not None:
            store.keys.setdefault(f"gen/{last.number}/plan", last.to_json())

    def _info(self, index: int) -> dict[str, Any]:
        return {"index": index, "name": f"node-{index}", "address": "", "port": 0, "num_slots": self.rules.num_slots}

    def _feed(self, index: int, event: Event) -> None:
        agent = self.agents[index]
        if agent.alive and not agent.frozen:
            self._perform(agent, agent.machine.handle(event, self.now_s))

    def _perform(self, agent: FakeAgent, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Publish(key, value, once):
                    keys = agent.store.keys
                    if self._reaches(agent, agent.store) and not (once and key in keys):
                        keys[key] = value
                        if key.endswith("/plan"):
                            self._check_known_step(Generation.from_json(value))
                case StartWorker(slot):
                    agent.next_pid += 1
                    agent.workers[slot] = FakeWorker(agent.next_pid, slot)
                case KillWorker(slot, _):
                    if slot in agent.workers:
                        del agent.workers[slot]
                        self._feed(agent.machine.index, WorkerExited(slot, -SIGKILL))
                case Probe(indices):
                    for index in indices:
                        if not self.agents[index].alive and self._ask(agent, index) == REFUSED:
                            self._feed(agent.machine.index, NodeDead(index, REFUSED))
                case Tell(slot, message):
                    self._tell(agent, slot, message)
                case Wake(indices):
                    self.woken.append((agent.machine.index, indices))
                case Note():
                    self.notes.append(instruction)
                case Finish():
                    agent.finish, agent.alive = instruction, False

    def _tell(self, agent: FakeAgent, slot: int, message: Mapping[str, Any]) -> None:
        worker = agent.workers.get(slot)
        if worker is None:
            return
        if message["type"] == "meet":
            if message.get("forget"):
                worker.step = None
            worker.met_in = agent.store
            self._fill(worker, Generation.from_json(message["plan"]))
        elif message["type"] == "pause":
            worker.paused = worker.generation == message["generation"]
            worker.is_leaving = worker.is_leaving or (worker.paused and "leave" in message)
        elif message["type"] == "break" and worker.generation == message["generation"]:
            self._lose_peer(agent.machine.index, worker)
        elif message["type"] == "exit":
            del agent.workers[slot]
            self._feed(agent.machine.index, WorkerExited(slot, 0))

    def _fill(self, worker: FakeWorker, plan: Generation) -> None:
        """A worker enters a generation: in doubt it follows the decision, empty or behind it is filled by others."""
        if worker.step is not None:
            assert worker.step <= plan.step, f"worker {worker.pid} at step {worker.step} was sent back to {plan.step}"
        worker.step, worker.in_doubt, worker.plan, worker.done = plan.step, False, plan, False
        worker.is_leaving = False


def _place_of(store: FakeStore) -> Place:
    return store.place
