"""Generations: the decision that starts the job on one mesh, as every agent and worker reads it.

A *meeting* takes the reports of all nodes that are there and ends in one generation (or in a reason to wait, or to
give up). The decision is a pure function of the reports, so that any agent may propose it; the first proposal that
reaches the store is the one that holds.

Steps. Each worker reports the step of its state. All took a step or none did, with one exception: workers that had
voted when the vote's outcome was lost to them. If any survivor knows that step as resolved, then every rank had voted,
and the workers in doubt follow it; otherwise no survivor took it, and none will.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from remesh.elasticity.model.alike import describe_unlike
from remesh.elasticity.model.failover import FIRST_PLACE, Base, Place, describe_missing_quorum
from remesh.elasticity.model.mesh_policy import MeshChoice, Template, decide_mesh, format_axes
from remesh.elasticity.model.outcome import Category
from remesh.elasticity.model.rank_assignment import MeshMember, choose_for_ranks, compute_keepers


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as it registered itself. A node that comes back registers anew, under another index."""

    index: int
    """Place in the order of registration. Invariant: unique."""
    name: str
    address: str
    port: int
    """TCP port of the agent's pulse: a connection that is refused proves that the agent is gone."""
    num_slots: int
    snapshot_port: int = 0
    """TCP port on which its agent keeps the snapshots of others."""
    store_port: int = 0
    """TCP port of its agent's own store, to which the job moves when the one in force is lost."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The report of one worker to a rendezvous."""

    slot: int
    pid: int
    template: dict[str, Any]
    """Mesh template of the worker's script, in its JSON form."""
    step: int | None = None
    """Batches resolved in the state it holds; None when it holds none."""
    in_doubt: bool = False
    """It voted for the next step and did not learn the outcome."""
    taken: bool = True
    """Whether the last resolved batch was taken (False: voted down)."""
    can_stay: bool = False
    """Whether its program can go on in its loop of steps, if its place in the mesh is the same again."""
    is_slow: bool = False
    """Whether it is to stand by, for it was slower than the others."""
    is_dispensable: bool = False
    """Whether it was asked to leave, and the job loses nothing without what it holds."""
    error: str = ""
    """The error that ended its last generation, if one did: type and first line."""
    known_step: int = 0
    """Batches that its node has seen resolved by any of its workers, whether they live or not."""
    options: dict[str, str] = field(default_factory=dict)
    """What its script asked for, by name: equal on all workers, for each saves and takes snapshots by its own."""


@dataclass(frozen=True)
class Generation:
    """One run on one mesh. What follows from its fields is kept once asked for, so it has no slots."""

    number: int
    """1 for the first. Invariant: one more than the generation before."""
    axes: dict[str, int]
    members: tuple[MeshMember, ...]
    """In rank order. Invariant: as many as the mesh has places."""
    standby: tuple[MeshMember, ...]
    """Live workers without a place; their rank is -1."""
    hosts: dict[int, str]
    """Node index -> node name, for the nodes of ``members`` and ``standby``."""
    step: int
    """Batches behind the job when this generation begins."""
    taken: bool
    """Outcome of the last of them, for members in doubt."""
    reason: str
    num_stalls: int = 0
    """How many generations in a row had the same members and no progress."""
    in_place: bool = False
    """Whether survivors go on in their loops: same shape, same ranks, new members. Then newcomers build their models
    without the others."""
    failures: dict[str, int] = field(default_factory=dict)
    """Node name -> how often it died, lost workers or had a slow one left out, in this job so far."""
    resting: tuple[tuple[int, int], ...] = ()
    """Processes on standby for being slow: node, and process id there."""
    is_behind: bool = False
    """Whether the newest state is of an earlier step than the one that the generation before began with."""
    place: Place = FIRST_PLACE
    """The store in which it was decided."""
    bases: tuple[Base, ...] = ()
    """Of which nodes its decision needed enough (:mod:`remesh.elasticity.model.failover`); none for the first."""
    known_step: int = 0
    """Batches that the job is known to have resolved by now, on any rank. Invariant: at least ``step``."""

    def to_json(self) -> dict[str, Any]:
        """The JSON form of the plan; all callers share one object, so do not change it."""
        return self._as_json

    @cached_property
    def _as_json(self) -> dict[str, Any]:
        # Not asdict: it copies every number of every member by itself.
        members = {key: [_member_json(one) for one in getattr(self, key)] for key in ("members", "standby")}
        nested = {"place": self.place.to_json(), "bases": [base.to_json() for base in self.bases], **members}
        return {each.name: getattr(self, each.name) for each in fields(self)} | nested

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Generation:
        fields = dict(value)
        fields["members"] = tuple(MeshMember(**member) for member in value["members"])
        fields["standby"] = tuple(MeshMember(**member) for member in value["standby"])
        fields["resting"] = tuple((int(node), int(pid)) for node, pid in value["resting"])
        fields["place"] = Place(**value["place"])
        fields["bases"] = tuple(Base.from_json(base) for base in value["bases"])
        fields["hosts"] = {int(index): name for index, name in value["hosts"].items()}
        return cls(**fields)

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Indices of all nodes with a worker in it."""
        return frozenset(self.hosts)

    @cached_property
    def first_node(self) -> int:
        """The node that acts for all: it watches the heartbeats, and publishes the end."""
        return min(self.hosts)

    @cached_property
    def keepers(self) -> Mapping[int, int | None]:
        """Rank -> node that keeps the second copy of its snapshots."""
        return compute_keepers(self.members, self.standby)

    def of_node(self, index: int) -> Sequence[MeshMember]:
        """The members on a node, those on standby last."""
        return self._by_node.get(index, ())

    @cached_property
    def _by_node(self) -> dict[int, list[MeshMember]]:
        found: dict[int, list[MeshMember]] = {}
        for member in (*self.members, *self.standby):
            found.setdefault(member.node, []).append(member)
        return found


@dataclass(frozen=True, slots=True)
class MeetingRules:
    """The limits and sizes that decide when a rendezvous may close."""

    min_nodes: int
    max_nodes: int
    last_call_s: float
    """How long the first meeting waits for more nodes once ``min_nodes`` are there."""
    join_timeout_s: float
    """How long a meeting waits for enough nodes and workers before the job gives up."""
    absence_timeout_s: float
    """How long it waits for a member that shows signs of life but does not come."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The meeting remains open."""

    reason: str
    absent: tuple[int, ...] = ()
    """Members of the last generation that are neither here nor known to be dead."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The meeting can never close well."""

    reason: str
    category: Category = Category.INFRASTRUCTURE


MAX_STALLS = 3
"""Generations without loss, joiner or progress before the job gives up instead of meeting for ever."""

_MAX_REASONS = 20
"""Changes that a reason names one by one; when half a large job joins, the reason is still short."""

Reports = Mapping[int, Sequence[WorkerReport]]
"""Node index -> the workers it brings to the meeting."""


def decide_generation(
    last: Generation | None,
    nodes: Mapping[int, NodeInfo],
    here: Reports,
    dead: Mapping[int, str],
    rules: MeetingRules,
    waited_s: float,
) -> Generation | Wait | GiveUp:
    """Close the meeting, or give the reason why not.

    ``last`` is the generation that ended (None for the first meeting), ``dead`` maps node indices to the proof of
    death, ``waited_s`` is how long this meeting has been open.
    """
    absent = tuple(sorted((last.nodes if last else frozenset()) - here.keys() - dead.keys()))
    if absent and waited_s < rules.absence_timeout_s:
        names = ", ".join(nodes[index].name for index in absent)
        return Wait(f"members not here yet: {names}", absent)
    num_here = sum(1 for reports in here.values() if reports)
    if num_here < rules.min_nodes:
        return _wait_or_give_up(f"{num_here} of at least {rules.min_nodes} nodes are here", rules, waited_s)
    if last is None and num_here < rules.max_nodes and waited_s < rules.last_call_s:
        return Wait(f"{num_here} of up to {rules.max_nodes} nodes are here, last call open")
    workers = _in_rank_order(here)
    if unlike := _describe_unlike(workers, nodes):
        return GiveUp(unlike, Category.INPUT)
    ordered, choice = _choose_mesh(workers, rules.min_nodes)
    if isinstance(choice, str):
        if num_here >= rules.max_nodes and last is None:
            return GiveUp(choice, Category.INPUT)
        return _wait_or_give_up(choice, rules, waited_s)
    step, taken = decide_step([report for _, report in workers])
    known_step = max(step, last.known_step if last else 0, *(report.known_step for _, report in workers))
    num_stalls = _count_stalls(last, {(node, report.pid) for node, report in workers}, step)
    if num_stalls >= MAX_STALLS:
        error = next((f" (last of all {one.error})" for _, one in workers if one.error), "")
        return GiveUp(
            f"the same members lost each other {num_stalls + 1} times at step {step} while all are alive{error}; the "
            "network between them does not carry, ranks call different collectives, or what they call can never succeed"
        )
    in_place = False
    if last is not None and choice.axes == last.axes:
        ordered = _keep_ranks(ordered, last)
        in_place = _can_all_stay(ordered[: choice.size], last)
    if len(ordered) < len(workers):
        ordered = [*ordered, *(one for one in workers if one[1].is_slow)]
    placed = [
        MeshMember(rank if rank < choice.size else -1, node, report.slot, report.pid)
        for rank, (node, report) in enumerate(ordered)
    ]
    return Generation(
        number=last.number + 1 if last else 1,
        axes=choice.axes,
        members=tuple(placed[: choice.size]),
        standby=tuple(placed[choice.size :]),
        hosts={node: nodes[node].name for node, _ in workers},
        step=step,
        taken=taken,
        num_stalls=num_stalls,
        in_place=in_place,
        failures=_count_failures(last, here, dead),
        resting=tuple((node, one.pid) for node, one in ordered[choice.size :] if one.is_slow),
        is_behind=last is not None and step < last.step,
        reason=_explain(last, nodes, here, {**dead, **dict.fromkeys(absent, "did not come in time")}, choice.reason),
        known_step=known_step,
    )


def decide_step(reports: Sequence[WorkerReport]) -> tuple[int, bool]:
    """The step that the next generation starts from, and the outcome of its last batch."""
    holders = [report for report in reports if report.step is not None]
    if not holders:
        return 0, True
    step = max(report.step or 0 for report in holders)
    known = next(report for report in holders if report.step == step)
    return step, known.taken


def compute_bases(last: Generation | None, step: int, gone: Collection[int]) -> tuple[Base, ...]:
    """The sets of nodes of which a decision after ``last`` needs enough, if the newest state is of ``step``."""
    if last is None:
        return ()
    own = Base(tuple(sorted(last.nodes)), last.place)
    bases = (own,) if step > last.step else (own, *last.bases)
    alive = (replace(base, nodes=tuple(node for node in base.nodes if node not in gone)) for base in bases)
    return tuple(dict.fromkeys(base for base in alive if base.nodes))


def check_state_is_here(
    plan: Generation, here: Reports, silent: Mapping[int, str], rules: MeetingRules, waited_s: float
) -> Wait | None:
    """Wait a while for members that fell silent if they may hold the newest state, and no worker here does.

    They may be slow only. ``silent`` maps their indices to their names.
    """
    holds = any(report.step is not None for reports in here.values() for report in reports) and not plan.is_behind
    absent = tuple(sorted(silent.keys() - here.keys()))
    if holds or not plan.known_step or not absent or waited_s >= rules.absence_timeout_s:
        return None
    names = ", ".join(silent[index] for index in absent)
    return Wait(
        f"no worker here holds the state of step {plan.known_step}, and these may be alive with it: {names}", absent
    )


def check_quorum(plan: Generation, here: Collection[int], rules: MeetingRules, waited_s: float) -> Wait | GiveUp | None:
    """Check that the nodes at the rendezvous may decide ``plan``: None if they may, else what to do instead."""
    missing = describe_missing_quorum(plan.bases, here, (), plan.place)
    if missing is None:
        return None
    absent = sorted({node for base in plan.bases for node in base.nodes}.difference(here))
    verdict = _wait_or_give_up(f"the others may go on without these: {missing}", rules, waited_s)
    return replace(verdict, absent=tuple(absent)) if isinstance(verdict, Wait) else verdict


def _is_same_template(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Compare templates, including the order of their axes: the first axis is the outermost."""
    return one == other and list(one["axes"]) == list(other["axes"])


def _describe_unlike(workers: Sequence[tuple[int, WorkerReport]], nodes: Mapping[int, NodeInfo]) -> str | None:
    """How the scripts of two workers ask for different jobs; None if all ask for one."""
    templates = [report.template for _, report in workers]
    if strange := next((one for one in templates if not _is_same_template(one, templates[0])), None):
        return f"workers ask for different meshes: {templates[0]} and {strange}; start the same script on every node"

    def who(place: int) -> str:
        node, report = workers[place]
        return f"worker {report.slot} of {nodes[node].name}"

    unlike = describe_unlike([report.options for _, report in workers], who)
    return unlike and (
        f"workers ask for different jobs: in remesh.elastic(...) {unlike}, expected one value; give it alike on every "
        "rank, and start the same script with the same arguments on every node"
    )


def _member_json(member: MeshMember) -> dict[str, int]:
    return {"rank": member.rank, "node": member.node, "slot": member.slot, "pid": member.pid}


def _count_stalls(last: Generation | None, here: set[tuple[int, int]], step: int) -> int:
    """``here``: node and process id of each worker; in containers all nodes have the same process ids."""
    if last is None or step > last.step or here != {(one.node, one.pid) for one in (*last.members, *last.standby)}:
        return 0
    return last.num_stalls + 1


def _in_rank_order(here: Reports) -> list[tuple[int, WorkerReport]]:
    """Workers in the order of their ranks: those with state first, fuller nodes first, nodes kept together."""

    def key(index: int) -> tuple[bool, int, int]:
        return all(report.step is None for report in here[index]), -len(here[index]), index

    return [
        (index, report) for index in sorted(here, key=key) for report in sorted(here[index], key=lambda one: one.slot)
    ]


def _choose_mesh(
    workers: list[tuple[int, WorkerReport]], min_nodes: int
) -> tuple[list[tuple[int, WorkerReport]], MeshChoice | str]:
    """Choose the workers for ranks, and the mesh; slow workers only if the mesh, its nodes or its state need them."""
    if not workers:
        return workers, "no worker is alive"
    template = Template.from_json(workers[0][1].template)
    sound = [(node, report) for node, report in workers if not report.is_slow]
    if len(sound) < len(workers) and decide_step([one for _, one in sound]) == decide_step([one for _, one in workers]):
        choice = decide_mesh(template, len(sound))
        if isinstance(choice, MeshChoice) and len({node for node, _ in sound}) >= min_nodes:
            return sound, choice
    slow = [(node, report) for node, report in workers if report.is_slow]
    return [*sound, *slow], decide_mesh(template, len(workers))


def _keep_ranks(workers: Sequence[tuple[int, WorkerReport]], last: Generation) -> list[tuple[int, WorkerReport]]:
    """Let workers that had a rank in a mesh of the same shape keep it; the other workers get the free ranks.

    So nothing moves but the state of workers that take a free rank.
    """
    ranks = {(member.node, member.slot, member.pid): member.rank for member in last.members}
    kept: dict[int, tuple[int, WorkerReport]] = {}
    others = []
    for node, report in workers:
        rank = ranks.get((node, report.slot, report.pid))
        if rank is None:
            others.append((node, report))
        else:
            kept[rank] = (node, report)
    free = [rank for rank in range(len(last.members)) if rank not in kept]
    near = {rank: (last.members[rank].node, last.keepers[rank]) for rank in free}
    taken, rest = choose_for_ranks(free, others, near)
    kept |= taken
    return [*(kept[rank] for rank in range(len(last.members))), *rest]


def _can_all_stay(workers: Sequence[tuple[int, WorkerReport]], last: Generation) -> bool:
    members = {(member.node, member.slot, member.pid) for member in last.members}
    survivors = [report for node, report in workers if (node, report.slot, report.pid) in members]
    return bool(survivors) and all(report.can_stay for report in survivors)


def _count_failures(last: Generation | None, here: Reports, dead: Mapping[int, str]) -> dict[str, int]:
    if last is None:
        return {}
    counts = dict(last.failures)
    for node, name in last.hosts.items():
        pids = {report.pid for report in here.get(node, ())}
        lost = {member.pid for member in last.of_node(node)} - pids
        left_out = {report.pid for report in here.get(node, ()) if report.is_slow}
        is_slow = any(member.rank >= 0 and member.pid in left_out for member in last.of_node(node))
        # A node that comes without workers leaves on request.
        if node in dead or (lost and pids) or is_slow:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _wait_or_give_up(reason: str, rules: MeetingRules, waited_s: float) -> Wait | GiveUp:
    if waited_s < rules.join_timeout_s:
        return Wait(reason)
    return GiveUp(f"{reason}; no node joined within {rules.join_timeout_s:g} s")


def _explain(
    last: Generation | None,
    nodes: Mapping[int, NodeInfo],
    here: Reports,
    dead: Mapping[int, str],
    choice: str,
) -> str:
    parts: list[str] = []
    if last:
        parts = [f"lost {nodes[index].name} ({dead[index]})" for index in sorted(last.nodes & dead.keys())]
        parts += [f"{nodes[index].name} joined" for index in sorted(here.keys() - last.nodes)]
        parts += [f"{nodes[index].name} left" for index in sorted(last.nodes & here.keys()) if not here[index]]
        for index in sorted(index for index in last.nodes & here.keys() if here[index]):
            pids = {report.pid for report in here[index]}
            known = [member.pid for member in last.of_node(index)]
            parts += [f"lost worker pid {pid} of {nodes[index].name}" for pid in known if pid not in pids]
            parts += [f"worker pid {pid} of {nodes[index].name} joined" for pid in sorted(pids.difference(known))]
        if len(parts) > _MAX_REASONS:
            parts = [*parts[:_MAX_REASONS], f"and {len(parts) - _MAX_REASONS} more such changes"]
    for node in sorted(here):
        rested = [one for one in here[node] if last and (node, one.pid) in last.resting and not one.is_slow]
        parts += [f"worker {one.slot} of {nodes[node].name} was slow" for one in here[node] if one.is_slow]
        parts += [f"worker {one.slot} of {nodes[node].name} has rested" for one in rested]
    if last and all(report.step is None for reports in here.values() for report in reports):
        parts.append("no survivor holds state")
    elif last and max(report.step or 0 for reports in here.values() for report in reports) < last.step:
        parts.append(f"no survivor holds step {last.step}")
    if last and not parts:
        parts = ["same members meet again"]
    was = f" (was {format_axes(last.axes)})" if last else ""
    return "; ".join([*parts, choice + was])
