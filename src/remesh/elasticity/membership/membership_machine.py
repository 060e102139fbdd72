"""Membership protocol of an agent as a state machine: events in, instructions out.

One agent runs per node and acts for the node's workers. Agents share nothing but a store of set-once keys:

    gen/<n>/pause    a node wants to join or leave: leave generation n together after the next step
    gen/<n>/broken   a node or worker is lost: leave generation n at once
    gen/<n>/here/<i> node i has come to the meeting for generation n, with these workers
    gen/<n>/lead/<k> who leads that meeting: the first to come; k counts the leaders that were lost on the way
    gen/<n>/plan     generation n as decided; the first proposal holds
    gen/<n>/done/<i> all of node i's workers ended well in generation n
    end              how the job ended

The leader of a meeting reads all reports and proposes; the others watch only it. Two leaders do no harm, since the
first plan holds: the leader decides who reads, not which plan is right. While a generation runs its first node watches
all others, and they watch that one.

When the store is lost, the agents move to another one (:mod:`remesh.elasticity.model.failover`) and report again what
they know.

The phases of an agent, and what takes it from one to another, are a table: :mod:`remesh.elasticity.membership.phases`.

Workers keep their processes through all of it: a worker is started once, and again only if it died and restarts
remain. Time comes with every event; the machine reads no clock.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from remesh.elasticity.membership.exclusion import (
    Keep,
    decide_hold_off,
    decide_leave_out,
    decide_rest,
    would_grow,
)
from remesh.elasticity.membership.instructions import (
    Event,
    Finish,
    Instruction,
    KillWorker,
    LeaveAsked,
    NodeDead,
    Note,
    OutOfReach,
    Publish,
    StartWorker,
    StoreMoved,
    StoreView,
    StragglerFound,
    Tell,
    Tick,
    Wake,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerLeft,
    WorkerReady,
    WorkerStepped,
    WorkerSuspects,
)
from remesh.elasticity.membership.phase_state import WAKE_NODES, PhaseState
from remesh.elasticity.membership.phases import ALLOWED, Deed, Phase
from remesh.elasticity.membership.rendezvous_state import AgentMeeting, Losses, conclude
from remesh.elasticity.membership.roster import Occupant, Roster, WorkerState
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.membership.view import Wants
from remesh.elasticity.model.generation import (
    Generation,
    GiveUp,
    Wait,
    WorkerReport,
)
from remesh.elasticity.model.outcome import Category, Outcome, shortened
from remesh.foundation.exit_codes import ExitCode

QUIET_TIMEOUT_S = 0.5
"""How long a meeting may take before those who wait for its leader look whether it lives."""


REPLACE_GRACE_S = 0.5
"""How long after a worker's death a process is started in its place: survivors usually train again by then."""


@dataclass
class AgentMachine:
    """One agent's part of the protocol."""

    index: int
    name: str
    """Name of the node, for people."""
    rules: AgentRules
    restarts_left: int = 0
    generation: Generation | None = None
    """The generation this node is or was last part of."""
    _roster: Roster = field(default_factory=Roster)
    _losses: Losses = field(default_factory=Losses)
    _meeting: AgentMeeting = field(init=False)
    """The open one, or the last."""
    _facts: dict[str, Publish] = field(default_factory=dict)
    """What this node has published of its present generation for good, by key: published again in a new store."""
    _in_phase: PhaseState = field(default_factory=PhaseState)
    _is_leaving: bool = False
    _lost_while_leaving: list[int] = field(default_factory=list)
    """Slots whose worker ended before it had handed over what it held."""
    _failures_seen: int = 0
    """How many failures of this node it last held off for, and since when."""
    _failures_seen_s: float = 0.0
    _end: Mapping[str, Any] | None = None
    _view: StoreView | None = None

    def __post_init__(self) -> None:
        self.restarts_left = self.rules.max_restarts
        self._meeting = AgentMeeting(self.index)

    def start(self, now_s: float) -> list[Instruction]:
        """The first instructions: start a worker in every slot."""
        self._in_phase = PhaseState(since_s=now_s)
        self._roster.workers = {slot: Occupant() for slot in range(self.rules.num_slots)}
        return [StartWorker(slot) for slot in self._roster.workers]

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event, return what to do, in order."""
        out: list[Instruction] = []
        match event:
            case WorkerReady(report) | WorkerLeft(report):
                self._roster.take(WorkerState.IDLE, report)
                if report.pid in self._roster.slow_until_s and not report.is_dispensable:
                    out.append(self._keep_slow(report))
                if self.phase is Phase.ENDING:
                    # It was still starting, or on its way out, when the others got the message.
                    out.append(self._report_exit(report.slot))
            case WorkerDone(generation, report):
                if self.generation and generation == self.generation.number:
                    self._roster.take(WorkerState.DONE, report)
            case WorkerStepped(step):
                self._roster.note_step(step)
            case WorkerSuspects(slot, generation, text):
                if self.phase is Phase.RUNNING and self.generation and generation == self.generation.number:
                    out += self._break(f"worker {slot} of {self.name} lost a peer: {text}")
            case WorkerFailed(slot, text, category):
                out.append(self._end_of_worker(slot, f"worker {slot} of {self.name} failed: {text}", category))
            case WorkerExited(slot, code):
                out += self._worker_exited(slot, code, now_s)
            case NodeDead(index, proof):
                self._losses.take(event)
                if self.phase is Phase.RUNNING and self.generation and index in self.generation.nodes:
                    out += self._break(f"{self.generation.hosts[index]} is gone: {proof}")
            case LeaveAsked(text):
                out += self._ask_out(text, now_s)
            case StragglerFound():
                out += self._leave_out(event, now_s)
            case StoreView():
                self._view = event
                if event.end is not None and self._end is None:
                    self._end = event.end
                    out += self._enter_ending(now_s)
            case OutOfReach(outcome):
                return [Finish(outcome)]
            case StoreMoved():
                out += self._report_again()
            case Tick():
                pass
        out += self._advance(now_s)
        self._facts |= {one.key: one for one in out if isinstance(one, Publish) and one.once}
        return out

    @property
    def phase(self) -> Phase:
        """The phase of the state machine."""
        return self._in_phase.phase

    @property
    def has_left(self) -> bool:
        """Whether this node left while the job goes on."""
        return self._is_leaving and (self._view is None or self._view.end is None)

    def look_again_s(self, now_s: float) -> float:
        """How soon to look for news again: more often for a moment while workers wait for a plan."""
        return self._in_phase.look_again_s(now_s, 1 if self.generation is None else len(self.generation.nodes))

    @property
    def wants(self) -> Wants:
        """The keys that the next view of the store must contain."""
        plan = self.generation
        is_done = self.phase is Phase.RUNNING and plan is not None and self.index == plan.first_node
        return Wants(self.index, self.phase, self._meeting.turn, is_done and self._in_phase.has_done(Deed.TELL_DONE))

    @property
    def watched(self) -> frozenset[int]:
        """The nodes whose heartbeats this agent is to look at."""
        plan = self.generation if self.phase in (Phase.RUNNING, Phase.LEAVING) else None
        if self.phase is Phase.MEETING and self._view is not None and self._view.leader is not None:
            if self._view.leader != self.index:
                return frozenset((self._view.leader,))
            plan = self._view.plan
        if plan is None:
            return frozenset()
        leads = self.phase is Phase.MEETING or self.index == plan.first_node
        return (plan.nodes if leads else frozenset((plan.first_node,))) - {self.index}

    def is_cause(self, slot: int) -> bool:
        """Whether the job ended because of this worker."""
        return self._end is not None and (self._end.get("node"), self._end.get("slot")) == (self.index, slot)

    # Each phase looks at the workers and the last view and does whatever is due; all are idempotent.

    def _advance(self, now_s: float) -> list[Instruction]:
        if self.phase is Phase.ENDING:
            return self._advance_ending(now_s)
        if self._view is None:
            return []
        if self.phase is Phase.STARTING:
            return self._advance_starting(now_s)
        if self.phase is Phase.MEETING:
            return self._advance_meeting(now_s)
        return self._advance_running(now_s)

    def _advance_starting(self, now_s: float) -> list[Instruction]:
        alive = self._roster.alive()
        if not alive or any(worker.state is WorkerState.STARTING for worker in alive.values()):
            return []
        out, holds_off = self._hold_off(now_s)
        return out if holds_off else [*out, *self._enter_meeting(now_s)]

    def _hold_off(self, now_s: float) -> tuple[list[Instruction], bool]:
        """Whether this node is to wait before it asks to be let in; logged once for each count of its failures."""
        view = self._view
        assert view is not None
        count = view.plan.failures.get(self.name, 0) if view.plan is not None else 0
        wait = decide_hold_off(self.name, count, self.rules.exclusion)
        if wait is None or view.broken is not None:
            return [], False
        out: list[Instruction] = []
        if self._failures_seen != count:
            self._failures_seen, self._failures_seen_s = count, now_s
            out.append(Note("excluded", {"reason": wait.reason, "seconds": wait.seconds}))
        return out, now_s - self._failures_seen_s < wait.seconds

    def _enter_meeting(self, now_s: float) -> list[Instruction]:
        view = self._view
        assert view is not None
        self._set_phase(Phase.MEETING, now_s)
        self._meeting = AgentMeeting(self.index, view.latest + 1)
        self._view = replace(view, leader=None)
        out: list[Instruction] = []
        if view.plan is not None and view.plan != self.generation:
            out.append(Publish(f"gen/{view.latest}/pause", {"text": f"{self.name} wants to join"}))
        meeting = self._meeting
        return [
            *out,
            meeting.bring(self._roster.reports()),
            meeting.lead(),
            Note("meeting", {"generation": meeting.number}),
        ]

    def _advance_meeting(self, now_s: float) -> list[Instruction]:
        view = self._view
        assert view is not None
        meeting, waited_s = self._meeting, now_s - self._in_phase.since_s
        if view.plan is not None and view.latest >= meeting.number:
            return self._adopt(view.plan, now_s)
        if self._roster.reports() != meeting.brought:
            return [meeting.bring(self._roster.reports())]
        if view.here.get(self.index) != meeting.brought or view.leader is None:
            return []
        if view.leader != self.index:
            return self._follow(view.leader, now_s)
        decision = conclude(view, self._losses, self.rules.meeting, waited_s)
        if isinstance(decision, Wait):
            is_new = now_s - self._in_phase.since_s > QUIET_TIMEOUT_S and self._in_phase.first(
                Deed.TELL_WAITING, decision.reason
            )
            notes = [Note("waiting", {"generation": meeting.number, "reason": decision.reason})] if is_new else []
            return [*notes, *self._in_phase.probe(decision.absent, now_s)]
        if isinstance(decision, GiveUp):
            return [Publish("end", {"ok": False, "text": decision.reason, "category": decision.category.value})]
        return [meeting.propose(decision)] if self._in_phase.first(Deed.PROPOSE) else []

    def _follow(self, leader: int, now_s: float) -> list[Instruction]:
        """Wait for the leader's plan; if the leader is gone, another node leads."""
        view = self._view
        assert view is not None
        if leader not in self._losses.proofs and view.here.get(leader) != ():
            is_late = now_s - self._in_phase.since_s > QUIET_TIMEOUT_S
            return self._in_phase.probe((leader,), now_s) if is_late else []
        self._meeting.turn += 1
        self._view = replace(view, leader=None)
        return [self._meeting.lead()]

    def _adopt(self, plan: Generation, now_s: float) -> list[Instruction]:
        mine = plan.of_node(self.index)
        if not mine:
            # Too late for this one, or no worker is up yet: ask to be let in, with whatever state there is.
            self._set_phase(Phase.STARTING, now_s)
            return self._advance_starting(now_s)
        self.generation = plan
        self._facts.clear()
        self._losses.forget(plan)
        self._set_phase(Phase.RUNNING, now_s)
        out: list[Instruction] = [Note("generation", plan.to_json())]
        if self._view is not None and self._view.place != plan.place:
            # Workers meet in the store where their agent read the plan, and those of other nodes did so in that one.
            return [*out, *self._break(f"the store moved before {self.name} had read generation {plan.number}")]
        for member in mine:
            worker = self._roster.workers[member.slot]
            if worker.state is not WorkerState.DEAD and self._roster.process_in(member.slot) == member.pid:
                placed = member.rank >= 0
                worker.state = WorkerState.TRAINING if placed else WorkerState.IDLE
                if placed:
                    self._roster.slow_until_s.pop(member.pid, None)
                    message = {"type": "meet", "rank": member.rank, "plan": plan.to_json()}
                    if member.pid in self._roster.left_behind:
                        message["forget"] = True
                    out.append(Tell(member.slot, message))
            else:
                out += self._break(f"worker {member.slot} of {self.name} died while the members met")
        self._roster.left_behind -= {member.pid for member in mine if member.rank >= 0}
        return out

    def _advance_running(self, now_s: float) -> list[Instruction]:
        view, plan = self._view, self.generation
        assert view is not None and plan is not None
        current = view.plan == plan
        out: list[Instruction] = []
        if self.phase is Phase.RUNNING and current and view.broken is not None:
            self._set_phase(Phase.LEAVING, now_s)
            out.append(Note("broken", {"generation": plan.number, "reason": view.broken}))
            out += self._send_to_training({"type": "break", "generation": plan.number, "reason": view.broken})
        elif (
            self.phase is Phase.RUNNING and current and view.pause is not None and self._in_phase.first(Deed.PASS_PAUSE)
        ):
            out.append(Note("pause", {"generation": plan.number, "reason": view.pause}))
            out += self._send_to_training({"type": "pause", "generation": plan.number, "reason": view.pause})
        elif self.phase is Phase.RUNNING and not current:
            # This node was thought dead, and the others went on: what its workers hold belongs to no generation.
            self._set_phase(Phase.LEAVING, now_s)
            reason = f"the others went on to generation {view.latest} without {self.name}"
            out.append(Note("left-behind", {"generation": plan.number, "reason": reason}))
            out += self._send_to_training({"type": "break", "generation": plan.number, "reason": reason})
            self._roster.left_behind |= {member.pid for member in plan.of_node(self.index)}
        if self.phase is Phase.LEAVING and now_s - self._in_phase.since_s > self.rules.leave_timeout_s:
            late = [slot for slot in self._roster.training() if self._in_phase.first(Deed.KILL, slot)]
            out += [KillWorker(slot, f"did not leave generation {plan.number} in time") for slot in late]
        return out + self._advance_members(current, now_s)

    def _advance_members(self, current: bool, now_s: float) -> list[Instruction]:
        """Publish what the node's workers have reached together: all done, all out, or one more waiting to get in."""
        view, plan = self._view, self.generation
        assert view is not None and plan is not None
        placed = [member for member in plan.of_node(self.index) if member.rank >= 0]
        workers = self._roster.workers
        states = [workers[one.slot].state for one in placed if self._roster.process_in(one.slot) == one.pid]
        if self.phase is Phase.RUNNING and all(state is WorkerState.DONE for state in states):
            if len(states) == len(placed) and self._in_phase.first(Deed.TELL_DONE):
                return [Publish(f"gen/{plan.number}/done/{self.index}", {})]
            if current and plan.nodes <= view.done:
                end = Publish("end", {"ok": True, "text": "all workers ended well"})
                return [end] if self._in_phase.first(Deed.TELL_END) else []
        is_out = not any(state is WorkerState.TRAINING for state in states)
        asked_out = self.phase is Phase.LEAVING or (current and view.pause is not None)
        if is_out and asked_out and not (self.phase is Phase.RUNNING and self._all_done_here(states)):
            return self._depart(now_s) if self._is_leaving else self._enter_meeting(now_s)
        if not current or view.pause is not None:
            return []
        rested, template = self._roster.take_rested(now_s), self._roster.template()
        if rested and template is not None and would_grow(plan, template) and self._in_phase.first(Deed.ASK_BACK):
            text = f"worker {rested[0]} of {self.name} comes back, it stood by for being slow"
            return [Publish(f"gen/{plan.number}/pause", {"text": text})]
        newcomers = self._roster.newcomers(plan, self.index)
        if not newcomers:
            return []
        out, holds_off = self._hold_off(now_s)
        if not holds_off and self._in_phase.first(Deed.ASK_IN):
            text = f"worker {newcomers[0]} of {self.name} wants to join"
            out.append(Publish(f"gen/{plan.number}/pause", {"text": text}))
        return out

    def _leave_out(self, found: StragglerFound, now_s: float) -> list[Instruction]:
        """Let a slow worker of this node stand by from the next step on, if the job is better off without it."""
        view, plan, template = self._view, self.generation, self._roster.template()
        if self.phase is not Phase.RUNNING or view is None or plan is None or template is None:
            return []
        if plan.number != found.generation or view.plan != plan or view.pause or view.broken:
            return []
        member = plan.members[found.rank]
        if member.node != self.index or member.pid in self._roster.indispensable:
            return []
        min_nodes = self.rules.meeting.min_nodes
        verdict = decide_leave_out(plan, template, rank=found.rank, ratio=found.ratio, min_nodes=min_nodes)
        if isinstance(verdict, Keep):
            return [Note("straggler-kept", {"reason": verdict.reason})]
        rest = decide_rest(self.name, plan.failures.get(self.name, 0) + 1, self.rules.exclusion)
        self._roster.slow_until_s[member.pid] = now_s + rest.seconds
        reason = f"{verdict.reason}; {found.reason}"
        message = {"type": "pause", "generation": plan.number, "reason": reason, "leave": True}
        return [
            Publish(f"gen/{plan.number}/pause", {"text": reason}),
            Note("excluded", {"reason": rest.reason, "seconds": rest.seconds}),
            Tell(member.slot, message),
        ]

    def _keep_slow(self, report: WorkerReport) -> Note:
        """Keep a slow worker that was to be left out: it came without having handed over its state."""
        del self._roster.slow_until_s[report.pid]
        self._roster.indispensable.add(report.pid)
        reason = f"worker {report.slot} of {self.name} keeps its rank: the job would lose steps without what it holds"
        return Note("straggler-kept", {"reason": reason})

    def _ask_out(self, text: str, now_s: float) -> list[Instruction]:
        """Leave with the others after the next step; at once when no generation is running."""
        if self._is_leaving or self.phase is Phase.ENDING:
            return []
        self._is_leaving = True
        if self.phase not in (Phase.RUNNING, Phase.LEAVING):
            return self._depart(now_s)
        assert self.generation is not None
        number = self.generation.number
        reason = f"{self.name} leaves: {text}"
        message = {"type": "pause", "generation": number, "reason": reason, "leave": True}
        return [Publish(f"gen/{number}/pause", {"text": reason}), *self._send_to_training(message)]

    def _depart(self, now_s: float) -> list[Instruction]:
        """Come to the next meeting without workers, so that no node waits for this one, and end."""
        view = self._view
        self._end = self._end_of_leaving()
        absence = [Publish(f"gen/{view.latest + 1}/here/{self.index}", {"workers": []}, once=False)] if view else []
        return [*absence, *self._enter_ending(now_s)]

    def _end_of_leaving(self) -> dict[str, Any]:
        lost = sorted({*self._lost_while_leaving, *self._roster.unsaved()})
        if not lost:
            return {"ok": True, "text": "left on request", "code": ExitCode.LEFT}
        workers = ", ".join(map(str, lost))
        text = f"left on request; what its workers {workers} held was not handed over and may be lost now"
        return {"ok": True, "text": text, "code": ExitCode.LEFT_WITHOUT_STATE}

    def _all_done_here(self, states: list[WorkerState]) -> bool:
        return bool(states) and all(state is WorkerState.DONE for state in states)

    def _report_again(self) -> list[Instruction]:
        """All that is known of the present generation, for a store that does not have it yet.

        Plans are left out: a node that adopted one brought it along, and one that no node adopted is decided anew.
        """
        view, self._view = self._view, None
        self._meeting.brought = None
        self._in_phase.done.clear()
        known = {key: one for key, one in self._facts.items() if not key.endswith("/plan")}
        if view is not None:
            for what, text in (("pause", view.pause), ("broken", view.broken)):
                if text is not None:
                    key = f"gen/{view.latest}/{what}"
                    known[key] = Publish(key, {"text": text})
            if view.end is not None:
                known["end"] = Publish("end", view.end)
        return list(known.values())

    def _worker_exited(self, slot: int, code: int, now_s: float) -> list[Instruction]:
        out: list[Instruction] = []
        is_unsaved = slot in self._roster.unsaved()
        had_called_in = self._roster.lose(slot)
        if self.phase is Phase.ENDING:
            return []
        if self._is_leaving:
            # What takes the node away may have sent its signal to the workers, too. None is started in its place.
            self._lost_while_leaving += [slot] if is_unsaved else []
            if self.phase is Phase.RUNNING and self._was_placed(slot):
                out += self._break(f"worker {slot} of {self.name}, which leaves, ended before it was out")
            return out if self._roster.alive() else [*out, *self._depart(now_s)]
        if code >= 0:
            what = "raised or exited" if had_called_in else "ended before it called remesh.elastic"
            hint = "" if had_called_in else ", or give --mode restart for a script that torchrun starts"
            text = f"worker {slot} of {self.name} {what} (exit code {code}); see its log{hint}"
            return [self._end_of_worker(slot, text)]
        name = signal.Signals(-code).name
        out = [Note("worker-killed", {"slot": slot, "signal": name})]
        if self.phase is Phase.RUNNING and self._was_placed(slot):
            out += self._break(f"worker {slot} of {self.name} was killed by {name}")
        if self.restarts_left > 0:
            self.restarts_left -= 1
            self._roster.workers[slot] = Occupant()
            # It takes seconds of a processor; the others of this node need theirs to go on.
            return [*out, StartWorker(slot, REPLACE_GRACE_S if len(self._roster.alive()) > 1 else 0.0)]
        if not self._roster.alive():
            # The node leaves; the others see its agent gone and go on without it.
            text = f"{self.name} has no worker and no restart left, the last was killed by {name}"
            self._end = {"ok": False, "text": text, "category": Category.WORKER.value}
            out += self._enter_ending(now_s)
        return out

    def _enter_ending(self, now_s: float) -> list[Instruction]:
        assert self._end is not None
        self._set_phase(Phase.ENDING, now_s)
        return [self._report_exit(slot) for slot in self._roster.alive()]

    def _advance_ending(self, now_s: float) -> list[Instruction]:
        assert self._end is not None
        alive = self._roster.alive()
        if not alive:
            return [Finish(self._outcome())] if self._in_phase.first(Deed.FINISH) else []
        if now_s - self._in_phase.since_s <= self.rules.exit_timeout_s:
            return []
        return [KillWorker(slot, "did not end as asked") for slot in alive if self._in_phase.first(Deed.KILL, slot)]

    # --- small helpers ---

    def _outcome(self) -> Outcome:
        assert self._end is not None
        category = None if self._end["ok"] else Category(self._end["category"])
        return Outcome(category, str(self._end["text"]), code=self._end.get("code", ExitCode.OK))

    def _report_exit(self, slot: int) -> Tell:
        assert self._end is not None
        return Tell(slot, {"type": "exit", "ok": self._end["ok"], "text": self._end["text"]})

    def _break(self, text: str) -> list[Instruction]:
        assert self.generation is not None
        others = tuple(sorted(self.generation.nodes - {self.index}))
        wake = [Wake(others)] if 0 < len(others) < WAKE_NODES else []
        return [Publish(f"gen/{self.generation.number}/broken", {"text": shortened(text)}), *wake]

    def _end_of_worker(self, slot: int, text: str, category: Category = Category.WORKER) -> Publish:
        short = shortened(text)
        end = {"ok": False, "text": short, "category": category.value, "node": self.index, "slot": slot}
        return Publish("end", end)

    def _was_placed(self, slot: int) -> bool:
        assert self.generation is not None
        return any(member.slot == slot and member.rank >= 0 for member in self.generation.of_node(self.index))

    def _send_to_training(self, message: Mapping[str, Any]) -> list[Instruction]:
        return [Tell(slot, message) for slot in self._roster.training()]

    def _set_phase(self, phase: Phase, now_s: float) -> None:
        assert (self.phase, phase) in ALLOWED, f"agent {self.index}: no way from {self.phase} to {phase}"
        self._in_phase = PhaseState(phase, now_s)
