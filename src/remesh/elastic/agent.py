"""The agent of a node: the shell around :mod:`remesh.elastic.membership.machine`.

It starts the workers (:mod:`remesh.elastic.processes`, one by one, so that one may die alone), hears them
(:mod:`remesh.elastic.switchboard`), reads the store, and carries out what the machine says. It decides nothing itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import Std

from remesh.comm.messages import Message
from remesh.comm.server import Peer
from remesh.comm.tls import Tls
from remesh.comm.token import Token
from remesh.elastic.events import EventLog
from remesh.elastic.failover import Place
from remesh.elastic.generation import NodeInfo, WorkerReport
from remesh.elastic.health.agent_side import HealthWatch
from remesh.elastic.health.machine import HealthMachine
from remesh.elastic.health.pace import PaceJudge
from remesh.elastic.membership.instructions import (
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
    Tell,
    Tick,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerLeft,
    WorkerReady,
    WorkerSuspects,
)
from remesh.elastic.membership.machine import AgentMachine
from remesh.elastic.membership.phases import Phase
from remesh.elastic.membership.rules import AgentRules
from remesh.elastic.membership.view import StoreReader
from remesh.elastic.outcome import Category, Outcome
from remesh.elastic.processes import ProcessSpec, WorkerProcesses
from remesh.elastic.snapshots.choice import choose_readers
from remesh.elastic.snapshots.keeper import SnapshotKeeper
from remesh.elastic.store.card import JobCard
from remesh.elastic.store.home import Address, Standing, StoreHome
from remesh.elastic.store.server import StoreWatch, is_listening
from remesh.elastic.store.shared import JobStore
from remesh.elastic.switchboard import SEND_TIMEOUT_S, Switchboard
from remesh.errors import PeerError

TICK_S = 0.01
"""How often an agent looks at the bell and at its processes."""
BEAT_INTERVAL_S = 0.5
BEATS_LOST = 10
"""A node whose heartbeat stands still for this many intervals is dead: 5 s, as TorchElastic's keep-alive."""

MAX_CONNECT_S = 60.0
"""How long the store may take to answer, as torchrun's default; a shorter join timeout shortens it."""
EXIT_BARRIER_S = 300.0
"""How long an agent that is done waits for the others, as TorchElastic's exit barrier."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What ``remesh run`` was asked for."""

    command: tuple[str, ...]
    """Program and arguments of a worker."""
    rules: AgentRules
    run_id: str
    endpoint: str
    """``host:port`` of the store; more of them, with commas, name where a newcomer may ask besides."""
    hosts_store: bool | None
    """Whether this agent hosts the store; None: if the endpoint names this machine, as torchrun does."""
    node_name: str
    local_address: str
    log_folder: Path | None
    redirects: Std
    tee: Std
    events_folder: Path | None
    card: JobCard
    """What all nodes of the job have in common."""
    token: Token
    tls: Tls | None = None
    """How state between nodes is encrypted; None: not at all."""


def describe_signal(ended: SystemExit) -> str:
    """What ended an agent that exits with 128 + the number of a signal."""
    return f"ended by {signal.Signals(int(ended.code or 0) - 128).name}"


class Agent:
    """Runs one node's part of a job. :meth:`run` blocks until the job ends and says how.

    ``listener`` sees every event of the agent, as the log does.
    """

    def __init__(self, config: AgentConfig, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._config = config
        self._listener = listener
        self._reader = StoreReader()
        self._rung = -1
        self._next_beat_s = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        self._finish: Finish | None = None
        self._leave_asked = False
        self._lost: dist.DistError | None = None
        """What the store's client said when the store was lost; None while there is one."""
        self._traceback = ""
        self._heard: list[Event] = []
        """What workers said since the last look."""

    def run(self) -> Outcome:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        with tempfile.TemporaryDirectory(prefix="remesh-") as folder, contextlib.ExitStack() as stack:
            self._board = stack.enter_context(
                Switchboard(
                    Path(folder), self._config.local_address, self._take_message, self._kill_deaf, self._note_refused
                )
            )
            self._processes = WorkerProcesses(self._process_spec(Path(folder)))
            self._keeper = stack.enter_context(
                SnapshotKeeper(self._config.local_address, self._config.token, self._config.tls)
            )
            watch = stack.enter_context(StoreWatch())
            self._home = stack.enter_context(StoreHome(self._address(), watch))
            self._store = self._home.connect()
            self._index = self._register()
            self._log = EventLog(self._config.events_folder, f"agent-{self._index}", self._listener)
            stack.callback(self._log.close)
            self._machine = AgentMachine(self._index, self._config.node_name, self._config.rules)
            health = HealthMachine(self._index, self._config.rules.hang_timeout_s)
            paces = PaceJudge(self._config.rules.stragglers)
            self._health = HealthWatch(health, paces, self._store, self._log, self._perform)
            stack.callback(self._processes.kill_all)
            self._handle_signals()
            self._log.write("agent", pid=os.getpid(), index=self._index, node=self._config.node_name)
            try:
                return self._loop()
            except SystemExit as ended:
                self._log.write("finish", ok=False, category=None, text=describe_signal(ended))
                raise

    def _loop(self) -> Outcome:
        self._perform(self._machine.start(time.monotonic()))
        while self._finish is None:
            self._board.wait(TICK_S)
            heard, self._heard = self._heard, []
            for event in heard:
                self._feed(event)
            self._poll_processes()
            if self._lost is None:
                try:
                    self._poll_store()
                    self._beat()
                    if self._machine.phase is Phase.RUNNING and (found := self._health.poll()) is not None:
                        self._feed(found)
                except dist.DistError as error:
                    self._lost = error
            self._feed(LeaveAsked("SIGTERM") if self._leave_asked else Tick())
            if self._lost is not None and self._finish is None:
                self._move_store(self._lost)
        outcome = self._finish.outcome
        category = outcome.category.value if outcome.category else None
        self._log.write("finish", ok=outcome.category is None, category=category, text=outcome.text)
        if not self._machine.has_left:
            self._say_goodbye()
        return replace(outcome, detail=self._traceback)

    def _feed(self, event: Event) -> None:
        self._perform(self._machine.handle(event, time.monotonic()))

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Publish(key, value, once):
                    self._publish(key, value, once)
                case StartWorker(slot):
                    self._start_worker(slot)
                case KillWorker(slot, reason):
                    self._log.write("kill-worker", slot=slot, reason=reason)
                    self._processes.kill(slot)
                case Tell(slot, message):
                    self._tell(slot, message)
                case Probe(indices):
                    for index in indices:
                        self._probe(index)
                case Note(kind, values):
                    self._log.write(kind, **values)
                    if kind == "generation" and self._machine.generation is not None:
                        self._health.begin(self._machine.generation)
                case Finish():
                    self._finish = instruction

    def _publish(self, key: str, value: Mapping[str, Any], once: bool) -> None:
        """What cannot be said now, the machine says again in the next store."""
        if self._lost is not None:
            return
        try:
            (self._store.put_once if once else self._store.put)(key, value)
            self._store.ring()
        except dist.DistError as error:
            self._lost = error

    def _tell(self, slot: int, message: Mapping[str, Any]) -> None:
        if slot not in self._board:
            return
        extra = {}
        if message["type"] == "meet":
            extra = {"store": self._home.way, **self._snapshots_for(int(message["rank"]))}
        self._board.send(slot, {**message, **extra})

    # --- workers ---

    def _process_spec(self, folder: Path) -> ProcessSpec:
        config = self._config
        environment = {
            "LOCAL_WORLD_SIZE": str(config.rules.num_slots),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "REMESH_LINK": str(self._board.path),
            "REMESH_NODE": config.node_name,
            "REMESH_EVENTS": str(config.events_folder or ""),
        }
        logs = config.log_folder or folder
        return ProcessSpec(config.command, config.node_name, environment, logs, config.redirects, config.tee)

    def _start_worker(self, slot: int) -> None:
        pid = self._processes.start(slot)
        # Starting processes installs torch's own handlers.
        self._handle_signals()
        self._log.write("worker-started", slot=slot, pid=pid)

    def _poll_processes(self) -> None:
        for ended in self._processes.poll():
            self._board.drop(ended.slot)
            self._log.write("worker-exited", slot=ended.slot, pid=ended.pid, code=ended.code)
            self._feed(WorkerExited(ended.slot, ended.code))
            if ended.code and self._machine.is_cause(ended.slot):
                self._traceback = ended.traceback

    def _handle_signals(self) -> None:
        signal.signal(signal.SIGINT, self._stopped)
        signal.signal(signal.SIGTERM, self._asked_to_leave)

    def _stopped(self, number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    def _asked_to_leave(self, number: int, frame: object) -> None:
        """SIGTERM is how a platform announces that it takes the node away. A second one ends the agent at once."""
        if self._leave_asked:
            self._stopped(number, frame)
        self._leave_asked = True

    def _take_message(self, peer: Peer, message: Message) -> None:
        """What makes no sense raises, and its sender is hung up on."""
        match message["type"]:
            case "keep":
                key = (int(message["generation"]), int(message["rank"]))
                self._keeper.adopt(key, int(message["pid"]), list(message["descriptors"]))
            case "progress" | "stack":
                self._health.take(message)
            case _:
                event = _event_of(message)
                if isinstance(event, WorkerReady):
                    self._board.bind(event.report.slot, peer)
                self._heard.append(event)

    def _kill_deaf(self, slot: int) -> None:
        self._log.write("kill-worker", slot=slot, reason=f"did not read a message for {SEND_TIMEOUT_S:g} s")
        self._processes.kill(slot)

    def _note_refused(self, reason: str) -> None:
        self._log.write("message-refused", reason=reason)

    def _snapshots_for(self, rank: int) -> Message:
        """What a worker needs to take snapshots, and its share of those that are kept here."""
        plan = self._reader.plan
        assert plan is not None
        mine = sorted(member.rank for member in plan.of_node(self._index) if member.rank >= 0)
        keeper = plan.keepers[rank]
        other = None if keeper is None else self._reader.node(self._store, keeper)
        kept = self._keeper.paths()
        return {
            "keeper": None if other is None else [other.address, other.snapshot_port],
            "secret": self._config.token.secret.hex(),
            "tls": None if self._config.tls is None else self._config.tls.to_message(),
            "snapshots": [path for key in choose_readers(kept, mine)[rank] for path in kept[key]],
        }

    # --- the store and the other agents ---

    def _address(self) -> Address:
        config = self._config
        return Address(
            run_id=config.run_id,
            endpoints=tuple(config.endpoint.split(",")),
            hosts_store=config.hosts_store,
            local_address=config.local_address,
            card=config.card,
            token=config.token,
            connect_timeout_s=min(config.rules.meeting.join_timeout_s, MAX_CONNECT_S),
            tls=config.tls,
        )

    def _register(self) -> int:
        index = self._home.next_index(self._store)
        info = NodeInfo(
            index=index,
            name=self._config.node_name,
            address=self._config.local_address,
            port=self._board.pulse_port,
            num_slots=self._config.rules.num_slots,
            snapshot_port=self._keeper.port,
            store_port=self._home.port,
        )
        self._store.put(f"nodes/{index}", asdict(info))
        self._reader.opening = self._home.opening
        self._reader.nodes[index] = info
        self._store.ring()
        return index

    def _move_store(self, error: dist.DistError) -> None:
        """The store is lost: find the one in force now, and say there what the old one knew."""
        started_s, endpoint = time.monotonic(), self._home.endpoint
        reason = str(error).partition("\n")[0]
        self._log.write("store-lost", endpoint=endpoint, reason=reason)
        found = self._home.move(self._standing())
        if found is None:
            text = (
                f"lost the store at {endpoint} ({reason}), and too few nodes are here to go on without it; start the "
                "job again, it goes on from its last checkpoint"
            )
            self._finish = Finish(Outcome(Category.INFRASTRUCTURE, text))
            return
        self._settle(found, time.monotonic() - started_s)

    def _standing(self) -> Standing:
        return Standing(self._index, self._reader.plan, self._reader.nodes)

    def _settle(self, store: JobStore, seconds: float) -> None:
        self._store.move_to(store)
        self._lost, self._rung = None, -1
        self._beats.clear()
        self._reader.move(self._store, self._home.opening)
        self._health.restart()
        home = self._home
        self._log.write(
            "store-moved", endpoint=home.endpoint, epoch=home.place.epoch, host=home.place.host, seconds=seconds
        )
        self._feed(StoreMoved())
        for index in home.silent.keys() & self._reader.nodes.keys():
            self._feed(NodeDead(index, "its agent did not answer when the store was lost", is_certain=False))
        self._store.ring()

    def _poll_store(self) -> None:
        rung = self._store.rings()
        if rung != self._rung:
            self._rung = rung
            self._feed(self._reader.read(self._store, self._machine.wants))

    def _say_goodbye(self) -> None:
        """Stay until every other agent has finished too: one of us may host the store that all need to the end."""
        deadline_s = time.monotonic() + EXIT_BARRIER_S
        with contextlib.suppress(RuntimeError):
            self._store.put(f"bye/{self._index}", {})
            others = [i for i in self._reader.read_nodes(self._store) if i != self._index]
            while others and time.monotonic() < deadline_s:
                others = [
                    i for i in others if self._store.get(f"bye/{i}") is None and self._is_listening(i) is not False
                ]
                time.sleep(TICK_S)

    def _probe(self, index: int) -> None:
        """A refused connection proves that no agent listens there any more; silence proves nothing (see _beat)."""
        if self._is_listening(index) is False:
            node = self._reader.nodes[index]
            self._feed(NodeDead(index, f"its agent at {node.address}:{node.port} refuses connections"))

    def _is_listening(self, index: int) -> bool | None:
        """Whether a node's agent accepts a connection; None when nothing answers."""
        node = self._reader.node(self._store, index)
        return None if node is None else is_listening(node.address, node.port)

    def _beat(self) -> None:
        """Raise our heartbeat, and look at those that the machine watches."""
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_INTERVAL_S
        self._store.count(f"beat/{self._index}", by=1)
        self._keeper.retire()
        for refusal in self._home.take_refusals():
            self._log.write("tls-refused", doing=refusal.doing, reason=refusal.reason)
        if (moved := self._home.read_moved(self._store)) is not None:
            self._follow(*moved)
            return
        watched = self._machine.watched
        # Whoever was not looked at for a while did not stand still.
        self._beats = {index: seen for index, seen in self._beats.items() if index in watched}
        for index in watched:
            beat = self._store.count(f"beat/{index}")
            before, since_s = self._beats.get(index, (-1, now_s))
            if beat != before:
                self._beats[index] = (beat, now_s)
            elif now_s - since_s > BEAT_INTERVAL_S * BEATS_LOST:
                self._feed(NodeDead(index, f"no heartbeat for {now_s - since_s:.1f} s", is_certain=False))

    def _follow(self, place: Place, endpoint: str) -> None:
        """The job went on elsewhere without this node: come back to it."""
        if self._reader.plan is None:
            text = f"this job goes on in another store: start this node with --rdzv-endpoint {endpoint}"
            self._finish = Finish(Outcome(Category.INPUT, text))
            return
        with contextlib.suppress(RuntimeError, OSError, PeerError):
            store = self._home.follow(self._standing(), place, endpoint)
            self._settle(store, 0.0)


def _event_of(message: Message) -> Event:
    """The event that a worker's message stands for."""
    match message["type"]:
        case "ready":
            return WorkerReady(WorkerReport(**message["report"]))
        case "left":
            return WorkerLeft(WorkerReport(**message["report"]))
        case "done":
            return WorkerDone(message["generation"], WorkerReport(**message["report"]))
        case "suspect":
            return WorkerSuspects(message["slot"], message["generation"], message["text"])
        case "failed":
            return WorkerFailed(message["slot"], message["text"], Category(message.get("category", "worker")))
        case other:
            raise PeerError(f"reading a worker's message: unknown kind {other!r}; worker and agent differ in version")
