"""Agent of a node: the shell around :mod:`remesh.elasticity.membership.membership_machine`.

It starts the workers (:mod:`remesh.elasticity.node.processes`, one by one, so that one may die alone), listens to them
(:mod:`remesh.elasticity.node.switchboard`), reads and writes the store (:mod:`remesh.elasticity.node.store_side`), and
carries out the machine's instructions. It decides nothing itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remesh.elasticity.health.agent_side import HealthWatch, PaceReport, StackReport
from remesh.elasticity.health.health_machine import HealthMachine
from remesh.elasticity.health.straggler_pace import PaceJudge
from remesh.elasticity.membership import instructions as do
from remesh.elasticity.membership.instructions import Event, Instruction
from remesh.elasticity.membership.membership_machine import AgentMachine
from remesh.elasticity.membership.phases import Phase
from remesh.elasticity.model.generation import NodeInfo
from remesh.elasticity.model.outcome import Outcome, describe_signal
from remesh.elasticity.node.config import DEFAULT_THREADS, AgentConfig
from remesh.elasticity.node.processes import ProcessSpec, WorkerProcesses
from remesh.elasticity.node.store_side import MovedBeforeError, StoreSide
from remesh.elasticity.node.switchboard import SEND_TIMEOUT_S, Deaf, HungUp, SnapshotOffer, Switchboard
from remesh.elasticity.own_folder import own_folder
from remesh.elasticity.snapshots.shelves import choose_readers
from remesh.elasticity.snapshots.snapshot_keeper import SnapshotKeeper
from remesh.elasticity.store.home import StoreHome
from remesh.elasticity.store.store_servers import StoreWatch
from remesh.elasticity.telemetry.events import EventLog
from remesh.foundation.exit_codes import of_signal
from remesh.foundation.settings import AGENT, EVENTS, LINK, NODE
from remesh.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Equipment:
    """The parts that an agent works with."""

    board: Switchboard
    processes: WorkerProcesses
    keeper: SnapshotKeeper
    store: StoreSide
    log: EventLog


def run_agent(config: AgentConfig, listener: Callable[[dict[str, Any]], None] | None = None) -> Outcome:
    """Run one node's part of a job; blocks until the job ends, and returns its outcome.

    ``listener`` sees every event of the agent, as the log does.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    while True:
        try:
            return _run_once(config, listener)
        except MovedBeforeError as moved:
            # It asks there, too, and takes another number: numbers belong to a store. Its workers hold nothing yet.
            config = replace(config, endpoint=f"{config.endpoint},{moved.endpoint}")


def _run_once(config: AgentConfig, listener: Callable[[dict[str, Any]], None] | None) -> Outcome:
    address = config.local_address
    with own_folder() as folder, contextlib.ExitStack() as stack:
        board = stack.enter_context(Switchboard(folder, address))
        keeper = stack.enter_context(SnapshotKeeper(address, config.token, config.tls))
        watch = stack.enter_context(StoreWatch())
        home = stack.enter_context(StoreHome(config.store_address, watch))
        store = StoreSide.join(home)
        processes = WorkerProcesses(_process_spec(config, store.index, board.path, folder))
        num_slots = config.rules.num_slots
        store.register(
            NodeInfo(store.index, config.node_name, address, board.pulse_port, num_slots, keeper.port, home.port)
        )
        log = EventLog(config.events_folder, f"agent-{store.index}", listener)
        stack.callback(log.close)
        stack.callback(processes.kill_all)
        agent = Agent(config, Equipment(board, processes, keeper, store, log))
        log.write("agent", pid=os.getpid(), index=store.index, node=config.node_name)
        try:
            return agent.run()
        except SystemExit as ended:
            log.write("finish", ok=False, category=None, text=describe_signal(ended))
            raise


class Agent:
    """The loop between an agent's machines and what they work with."""

    def __init__(self, config: AgentConfig, equipment: Equipment) -> None:
        self._config = config
        self._board, self._processes = equipment.board, equipment.processes
        self._keeper, self._store, self._log = equipment.keeper, equipment.store, equipment.log
        rules, index = config.rules, equipment.store.index
        self._machine = AgentMachine(index, config.node_name, rules)
        health = HealthMachine(index, rules.hang_timeout_s)
        self._health = HealthWatch(health, PaceJudge(rules.stragglers), self._store.shared, self._log, self._perform)
        self._outcome: Outcome | None = None
        self._leave_asked = False
        self._traceback = ""
        self._to_start: dict[int, float] = {}
        """Slots to start a worker in, and when."""

    def run(self) -> Outcome:
        """Run until the state machine has the outcome of the job."""
        self._handle_signals()
        self._perform(self._machine.start(time.monotonic()))
        while self._outcome is None:
            self._take_reports()
            self._poll_processes()
            self._start_workers()
            if not self._store.is_lost:
                self._poll_store()
            self._feed([do.LeaveAsked("SIGTERM") if self._leave_asked else do.Tick()])
            if self._store.is_lost and self._outcome is None:
                with self._store.requests():
                    self._feed(self._store.move(self._log))
        outcome = self._outcome
        category = outcome.category.value if outcome.category else None
        self._log.write("finish", ok=outcome.category is None, category=category, text=outcome.text)
        if not self._machine.has_left:
            self._store.send_goodbye()
        return replace(outcome, detail=self._traceback)

    def _feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, do.StoreMoved):
                self._health.restart()
            self._perform(self._machine.handle(event, time.monotonic()))

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case do.Publish(key, value, once):
                    self._store.publish(key, value, once=once)
                case do.StartWorker(slot, after_s):
                    self._to_start[slot] = time.monotonic() + after_s
                    self._start_workers()
                case do.KillWorker(slot, reason):
                    self._kill_worker(slot, reason)
                case do.Tell(slot, message):
                    self._send(slot, message)
                case do.Probe(indices):
                    with self._store.requests():
                        self._feed(self._store.probe(indices))
                case do.Wake(indices):
                    self._board.wake(self._store.places(indices))
                case do.Note(kind, values):
                    self._log.write(kind, **values)
                    if kind == "generation" and self._machine.generation is not None:
                        self._health.begin(self._machine.generation)
                case do.Finish(outcome):
                    self._outcome = outcome

    def _poll_store(self) -> None:
        with self._store.requests():
            self._feed(self._store.look(self._machine.wants))
            found = self._store.beat(self._machine.watched, self._log)
            if found is not None:
                self._keeper.retire()
                self._feed(found)
            if self._machine.phase is Phase.RUNNING and (slow := self._health.poll()) is not None:
                self._feed([slow])

    # --- workers ---

    def _start_workers(self) -> None:
        now_s = time.monotonic()
        due = [slot for slot, due_s in self._to_start.items() if due_s <= now_s]
        for slot in due:
            del self._to_start[slot]
            if self._leave_asked:
                self._feed([do.WorkerExited(slot, -signal.SIGTERM)])  # it was to replace one that ended
                continue
            pid = self._processes.start(slot)
            # Starting processes installs torch's own handlers.
            self._handle_signals()
            self._board.watch(slot, pid)
            self._log.write("worker-started", slot=slot, pid=pid)

    def _kill_worker(self, slot: int, reason: str) -> None:
        self._log.write("kill-worker", slot=slot, reason=reason)
        self._processes.kill(slot)

    def _take_reports(self) -> None:
        for heard in self._board.wait(self._machine.look_again_s(time.monotonic())):
            match heard:
                case SnapshotOffer():
                    self._keeper.adopt((heard.generation, heard.rank), heard.pid, heard.descriptors)
                case PaceReport(step=step):
                    self._health.take(heard)
                    self._feed([do.WorkerStepped(step)])
                case StackReport():
                    self._health.take(heard)
                case Deaf(slot):
                    self._kill_worker(slot, f"did not read a message for {SEND_TIMEOUT_S:g} s")
                case HungUp(reason):
                    self._log.write("message-refused", reason=reason)
                case _:
                    self._feed([heard])

    def _poll_processes(self) -> None:
        for ended in self._processes.poll():
            self._board.drop(ended.slot)
            self._log.write("worker-exited", slot=ended.slot, pid=ended.pid, code=ended.code)
            if self._leave_asked:
                self._feed([do.LeaveAsked("SIGTERM")])  # which may have ended the worker, too
            self._feed([do.WorkerExited(ended.slot, ended.code)])
            if ended.code and self._machine.is_cause(ended.slot):
                self._traceback = ended.traceback

    def _send(self, slot: int, message: Mapping[str, Any]) -> None:
        if slot in self._board:
            extra = self._network_for(int(message["rank"])) if message["type"] == "meet" else {}
            self._board.send(slot, {**message, **extra})

    def _network_for(self, rank: int) -> Message:
        """The store's address for a worker, what it needs for snapshots, and its share of those kept here."""
        config, plan = self._config, self._store.plan
        assert plan is not None
        mine = sorted(member.rank for member in plan.of_node(self._store.index) if member.rank >= 0)
        keeper = plan.keepers[rank]
        other = None if keeper is None else self._store.node(keeper)
        kept = self._keeper.paths()
        return {
            "store": self._store.way,
            "keeper": None if other is None else [other.address, other.snapshot_port],
            "secret": config.token.secret.hex(),
            "tls": None if config.tls is None else config.tls.to_message(),
            "snapshots": [path for key in choose_readers(kept, mine)[rank] for path in kept[key]],
        }

    # --- signals ---

    def _handle_signals(self) -> None:
        signal.signal(signal.SIGINT, self._stopped)
        signal.signal(signal.SIGTERM, self._asked_to_leave)

    def _stopped(self, number: int, _frame: object) -> None:
        raise SystemExit(of_signal(number))

    def _asked_to_leave(self, number: int, frame: object) -> None:
        """SIGTERM is how a platform announces that it takes the node away. A second one ends the agent at once."""
        if self._leave_asked:
            self._stopped(number, frame)
        self._leave_asked = True


def _process_spec(config: AgentConfig, index: int, link: Path, folder: Path) -> ProcessSpec:
    environment = {
        "LOCAL_WORLD_SIZE": str(config.rules.num_slots),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", DEFAULT_THREADS),
        LINK.name: str(link),
        AGENT.name: str(index),
        NODE.name: config.node_name,
        EVENTS.name: str(config.events_folder or ""),
    }
    logs = config.log_folder or folder
    keeps_logs = config.log_folder is not None
    return ProcessSpec(config.command, config.node_name, environment, logs, config.redirects, config.tee, keeps_logs)
