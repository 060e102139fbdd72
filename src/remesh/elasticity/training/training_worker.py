"""Worker process: it meets, trains, leaves, meets again.

connect to the agent ──> ready ──> meet: grow the lower half, make a Job, call train(job)
                           ^          |
                           |          +── train returns: done, wait
                           |          +── Leave, or a collective lost a peer: left (with what is held)
                           +──────────+     shed the lower half, keep the state
                                      +── user code raised: failed, the job ends everywhere
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from traceback import TracebackException
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from remesh.elasticity.health.watch import BusyMeter, look_at_main_thread
from remesh.elasticity.link import WorkerLink
from remesh.elasticity.model.generation import Generation, WorkerReport
from remesh.elasticity.model.mesh_policy import Template
from remesh.elasticity.snapshots.opened import read_snapshot
from remesh.elasticity.snapshots.snapshot_memory import SnapshotBuffer
from remesh.elasticity.snapshots.taker import Shelf, SnapshotTaker
from remesh.elasticity.store.store_line import StoreLine
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.job import Job
from remesh.elasticity.training.place import JobOptions, Leave, RankPlace
from remesh.elasticity.training.position import derive_seed
from remesh.elasticity.training.seeds import seed_everything
from remesh.elasticity.training.session import TrainingSession
from remesh.elasticity.training_state import HeldState
from remesh.foundation.errors import FormatError, PeerError
from remesh.foundation.settings import AGENT, EVENTS, NODE, SLOT, timeout_s
from remesh.foundation.threads import make_thread
from remesh.groups.blame import is_network_error
from remesh.groups.lower import LowerHalf
from remesh.layout.from_torch import forget_meshes
from remesh.wire.messages import Line, Message
from remesh.wire.tls import Tls
from remesh.wire.token import Token

STORE_TIMEOUT_S = timeout_s(60.0)
"""How long the store may take to answer, unless it is known to be gone or the generation is left: then at once."""
PROGRESS_INTERVAL_S = 0.5
"""How often a worker reports to its agent that it makes steps."""
STILL_INSIDE_GRACE_S = 1.0
"""How long after a break a worker is thought to be on its way out."""
_MAX_ERROR_CHARS = 1000
"""Characters of an error's first line that are sent to the agent."""
_SOURCE_PLACE = re.compile(r"^\[[^]]*\] ")
"""The source file that gloo's messages begin with."""


class Exit(BaseException):
    """The agent has sent that the job is over."""

    def __init__(self, ok: bool, text: str) -> None:
        super().__init__(text)
        self.ok = ok


class TrainingWorker:
    """The worker's side of the membership protocol."""

    def __init__(self, line: Line, template: Template, options: JobOptions) -> None:
        self._slot = int(SLOT.read())
        events = EVENTS.read()
        # In containers every node counts its processes from 1, and all nodes may write into one folder.
        who = f"worker-{AGENT.read()}-{os.getpid()}"
        self._log = EventLog(Path(events) if events else None, who)
        self._template = template.to_json()
        self._options = options
        self._link = WorkerLink(line, self._on_urgent)
        backend, device_type = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
        if device_type == "cuda":
            torch.cuda.set_device(self._slot)
        self._lower = LowerHalf(backend, device_type, options.timeout_s)
        self._line: StoreLine | None = None
        """To the store in force, for making groups; None before the first."""
        self._held: HeldState | None = None
        self._taken = True
        self._is_dispensable = False
        self._session: TrainingSession | None = None
        self._next_meeting: Message | None = None
        """A meeting's outcome that arrived while a vote was being resolved."""
        self._generation = 0
        # Written by the link's thread, read by the main thread; numbers only grow.
        self._broken = 0
        self._paused = 0
        self._leaving = 0
        self._last_error: TracebackException | None = None
        """What ended the last generation; None once a step was taken since."""
        self._meter = BusyMeter()
        self._reported_s: float | None = None
        """When this worker last reported a step in this generation; None before its first."""
        self._steps_unreported = 0

    def run(self, train: Callable[[Job], Any]) -> None:
        """Go from generation to generation; ends by raising :class:`Exit`."""
        self._link.start()
        self._meter.start()
        self._log.write("worker", pid=os.getpid(), slot=self._slot, node=NODE.read())
        self._link.send({"type": "ready", "report": asdict(self._report())})
        try:
            while True:
                message = self._next_meeting or self._link.next()
                self._next_meeting = None
                if message["type"] == "exit":
                    if not message["ok"]:
                        self._print_last_error()
                    raise Exit(bool(message["ok"]), str(message["text"]))
                if message.get("forget"):
                    self._held = None
                self._lower.shed()
                forget_meshes()
                self._stay(train, Generation.from_json(message["plan"]), message)
        finally:
            self._meter.stop()
            self._lower.shed()
            self._link.close()

    def _stay(self, train: Callable[[Job], Any], plan: Generation, message: Message) -> None:
        """Train from making the process groups to leaving them: one generation, or several of one shape."""
        rank = int(message["rank"])
        self._message = message
        self._taker = SnapshotTaker(self._shelf_of(plan, message), self._link.send, self._log.write)
        # From now on a break of this generation severs what grows; one that came before is in `_broken`.
        self._generation = plan.number
        self._reported_s = None
        try:
            if plan.in_place:
                self._lower.pretend(rank, plan.axes)
            else:
                self._grow(plan, message)
            seed_everything(derive_seed(self._options.seed))
            self._session = self._make_stint(plan, message)
            # From here on the job keeps the held state, and drops it once it is filled: not two copies.
            self._held = None
            train(Job(self._session, self._log))
            self._session.finish()
            self._keep()
            self._link.send({"type": "done", "generation": self._generation, "report": asdict(self._report())})
        except Leave:
            self._leave(None)
        except Exception as error:
            if self.is_broken or is_network_error(error):
                self._leave(error)
            else:
                self._fail(error)
        finally:
            self._taker.close()

    def _make_stint(self, plan: Generation, message: Message) -> TrainingSession:
        # No name of a caller refers to the snapshots: what looks into their memory goes with the fill.
        snapshots = self._read_snapshots(message)
        place = RankPlace(plan, int(message["rank"]), self._lower, self._taker, plan.in_place, snapshots)
        return TrainingSession(place, self._held, caller=self, options=self._options, log=self._log)

    def _grow(self, plan: Generation, message: Message) -> None:
        rank = int(message["rank"])
        if self.is_broken:
            raise PeerError(
                f"entering generation {plan.number}: it has already failed; all workers join a new generation"
            )
        line = self._line_to(str(message["store"]))
        store = dist.PrefixStore(f"remesh/{os.environ['TORCHELASTIC_RUN_ID']}/groups/gen{plan.number}", line.store)
        self._lower.grow(store, rank, plan.axes, wake=line.cut)
        self._log.write("grown", generation=plan.number, rank=rank, axes=plan.axes, in_place=plan.in_place)

    def _line_to(self, endpoint: str) -> StoreLine:
        """The connection to the store that is in force; connections end with the store they were made to."""
        if self._line is None or self._line.is_cut or self._line.endpoint != endpoint:
            self._line = StoreLine(
                endpoint, patience_s=STORE_TIMEOUT_S, timeout_s=STORE_TIMEOUT_S, is_over=lambda: self.is_broken
            )
        return self._line

    def _shelf_of(self, plan: Generation, message: Message) -> Shelf:
        keeper = message["keeper"]
        token = Token(os.environ["TORCHELASTIC_RUN_ID"], bytes.fromhex(message["secret"]))
        where = None if keeper is None else (str(keeper[0]), int(keeper[1]))
        return Shelf(plan.number, int(message["rank"]), where, token, Tls.from_message(message["tls"]))

    def _read_snapshots(self, message: Message) -> tuple[HeldState, ...]:
        """This worker's share of the snapshots on its node; one that is damaged or gone is logged and left out."""
        found = []
        for path in message["snapshots"]:
            try:
                with contextlib.closing(SnapshotBuffer.open(path)) as buffer:
                    held = read_snapshot(buffer)
            except (OSError, FormatError) as error:
                self._log.write("snapshot-unread", path=path, reason=str(error))
                continue
            found += [held] if held is not None else []
        return tuple(found)

    def _leave(self, error: Exception | None) -> None:
        """Leave the generation: keep the state, report to the agent. Reported already if a vote was resolved."""
        self._keep(error)
        self._lower.sever()
        if self._next_meeting is None:
            if error is not None:
                self._suspect(error)
            self._send_left(in_doubt=False)

    def _fail(self, error: Exception) -> None:
        """User code raised: record it as torchrun's workers do, and wait for the message that the job is over."""
        self._session = None
        get_error_handler().record_exception(error)
        text = f"{type(error).__name__}: {error}"
        self._link.send({"type": "failed", "slot": self._slot, "text": text})
        while (message := self._link.next())["type"] != "exit":
            pass
        raise Exit(False, str(message["text"]))

    def _keep(self, error: BaseException | None = None) -> None:
        if self._session is not None:
            self._held = self._session.hold(error)
            self._taken = self._session.last_taken
            self._is_dispensable = self._session.is_dispensable
            self._session = None

    def _suspect(self, error: BaseException) -> None:
        # Not the error itself: its frames hold the batch and the model.
        self._last_error = TracebackException.from_exception(error, lookup_lines=False)
        if not is_network_error(error):
            # It followed from the break, or it is the program's own: no other process will print it.
            self._print_last_error()
        text = _SOURCE_PLACE.sub("", str(error) or type(error).__name__).partition("\n")[0].partition(". ")[0]
        self._link.send({"type": "suspect", "slot": self._slot, "generation": self._generation, "text": text})

    def _print_last_error(self) -> None:
        if self._last_error is not None:
            text = "".join(self._last_error.format())
            sys.stderr.write(f"remesh: what ended the work in generation {self._generation}:\n{text}")
            sys.stderr.flush()

    def _send_left(self, *, in_doubt: bool) -> None:
        report = self._report(in_doubt=in_doubt)
        self._log.write("left", generation=self._generation, step=report.step, in_doubt=in_doubt)
        self._link.send({"type": "left", "report": asdict(report)})

    def _report(self, *, in_doubt: bool = False) -> WorkerReport:
        session, held = self._session, self._held
        step = session.position.step if session is not None else held.step if held is not None else None
        taken = session.last_taken if session is not None else self._taken
        return WorkerReport(
            self._slot,
            os.getpid(),
            self._template,
            step,
            in_doubt,
            taken,
            can_stay=session is not None and session.can_stay,
            is_dispensable=session.is_dispensable if session is not None else self._is_dispensable,
            error=_first_line(self._last_error),
            options=self._options.describe(),
        )

    # --- Caller, for the job ---

    @property
    def wants_pause(self) -> bool:
        return self._paused >= self._generation

    @property
    def is_leaving(self) -> bool:
        return self._leaving >= self._generation

    def note_step(self) -> None:
        self._last_error = None
        now_s = time.monotonic()
        self._steps_unreported += 1
        if self._reported_s is not None and now_s - self._reported_s < PROGRESS_INTERVAL_S:
            return
        share = self._meter.take_share()
        # The first step of a generation has the filling before it, and does not show the pace.
        busy_s = None if self._reported_s is None else (now_s - self._reported_s) / self._steps_unreported * share
        step = 0 if self._session is None else self._session.position.step
        progress = {"type": "progress", "slot": self._slot, "generation": self._generation, "busy_s": busy_s}
        self._link.send({**progress, "step": step})
        self._reported_s, self._steps_unreported = now_s, 0

    @property
    def is_broken(self) -> bool:
        return self._broken >= self._generation

    def bind(self) -> None:
        plan = Generation.from_json(self._message["plan"])
        self._lower.shed()
        self._grow(plan, self._message)

    def rejoin(self, error: BaseException | None) -> RankPlace | None:
        session = self._session
        assert session is not None
        while True:
            self._lower.sever()
            if self._next_meeting is None:
                if error is not None:
                    self._suspect(error)
                self._send_left(in_doubt=False)
            message = self._next_meeting or self._link.next()
            self._next_meeting = message
            if message["type"] == "exit":
                raise Exit(bool(message["ok"]), str(message["text"]))
            plan = Generation.from_json(message["plan"])
            if not plan.in_place or int(message["rank"]) != session.rank:
                return None
            self._next_meeting, self._message = None, message
            self._taker.close()
            self._taker = SnapshotTaker(self._shelf_of(plan, message), self._link.send, self._log.write)
            self._lower.shed()
            self._generation, self._reported_s = plan.number, None
            try:
                self._grow(plan, message)
            except Exception as lost:
                if not is_network_error(lost):
                    raise
                error = lost
                continue
            return RankPlace(plan, session.rank, self._lower, self._taker, snapshots=self._read_snapshots(message))

    def resolve_vote(self, error: BaseException) -> bool | None:
        session = self._session
        assert session is not None
        self._lower.sever()
        self._suspect(error)
        self._send_left(in_doubt=True)
        message = self._link.next()
        if message["type"] == "exit":
            raise Exit(bool(message["ok"]), str(message["text"]))
        self._next_meeting = message
        plan = Generation.from_json(message["plan"])
        # Only the meeting that this rank was at answers for its vote; a later one is about a batch computed again.
        is_answer = plan.number == self._generation + 1 and plan.step == session.position.step + 1
        return plan.taken if is_answer else None

    # --- the link's thread ---

    def _on_urgent(self, message: Message) -> bool:
        if message["type"] == "break":
            self._broken = int(message["generation"])
            if self._broken == self._generation:
                self._lower.sever()
                make_thread("still-inside", self._tell_if_inside, self._broken, daemon=True).start()
            return True
        if message["type"] == "stacks":
            self._tell_stack(int(message["generation"]))
            return True
        if message["type"] == "pause":
            if message.get("leave"):
                self._leaving = int(message["generation"])
            self._paused = int(message["generation"])
            return True
        return False

    def _tell_stack(self, generation: int) -> None:
        standing, session = look_at_main_thread(), self._session
        stack = {
            "rank": -1,
            "node": -1,
            "slot": self._slot,
            "step": session.position.step if session is not None else 0,
            **asdict(standing),
        }
        self._link.send({"type": "stack", "slot": self._slot, "generation": generation, "stack": stack})

    def _tell_if_inside(self, generation: int) -> None:
        """Leave a trace of where this worker sits although its generation is broken: it may be killed for it."""
        time.sleep(STILL_INSIDE_GRACE_S)
        if self._session is not None and self._generation == generation:
            standing = look_at_main_thread()
            self._log.write("still-inside", generation=generation, place=standing.place, stack=standing.text)


def _first_line(error: TracebackException | None) -> str:
    return "" if error is None else "".join(error.format_exception_only()).partition("\n")[0][:_MAX_ERROR_CHARS]
