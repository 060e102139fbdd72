"""A job in a box: ranks that run small scripts, a network, and the rounds of ``remesh.comm``, one event at a time.

Every choice that a real job leaves to chance is a choice here: which rank runs, which message arrives, when a rank
hears of the checkpoint, whether a wave finds that nothing moves. `explore` walks all of them. A script is a tuple of
operations:

    ("send", rank), ("recv", rank or None)    messages; None: from anybody
    ("coll", key)       a collective that ends for a member once all members are inside of it
    ("large", key)      the same, and it cannot begin anew: its inputs have changed
    ("make", key)       the group itself is made: the same; nobody says anything of it before
    ("tell", key)       ends for the first member without the others, and for those once the first has entered
    ("start", key), ("wait", key)             one that is started, and waited for with all others of its key
    ("small", key)      made of messages, one from each member to each other: outlives the network as they do
    ("give", key)       made of messages, too: one from the first member to each other
    ("free", key)       the rank has no use for it any more
    ("spin", None)      computes for so long that no round sees the end

With a clock (programs of torch) the network ends collectives whatever a round says. Ranks are held: they enter no
others but up to targets, and say which of those that they are inside of have to end. Without one (programs of MPI) they
say what they have entered and what has ended there; "tell" breaks the rule that this needs. After a restart the network
knows of no collective but those that are open on a rank, which it begins anew.

Without a clock the first collective of a key ends for nobody before all are inside of it, which all hear of, but on
"world", which all know from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remesh.carried.rounds.round_machine import Ask, Commit, End, Round, RoundPhase, TakeImage
from remesh.carried.rounds.status import Activity, ClockProgress, CollectiveProgress, Status, pairs

Counts = tuple[tuple[str, int], ...]
Script = tuple[tuple[str, Any], ...]
WORLD = "world"
_COLLECTIVE = ("coll", "large", "make", "tell", "start", "small", "give")
_HAS_TO_END = ("large", "make")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: its program, and what its lower half knows."""

    position: int = 0
    entered: Counts = ()
    """Collectives entered."""
    freed: Counts = ()
    """Collectives that were entered on what has been freed."""
    open: Counts = ()
    """Collectives of the network that are not complete: key and number."""
    begun: Counts = ()
    """Those that this rank has taken part in since the network was new."""
    done: Counts = ()
    """Those that are complete."""
    small: Counts = ()
    """The collective of messages that it is inside of."""
    parts: tuple[tuple[str, int, int], ...] = ()
    """Key, number and source of parts of such that have come."""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()
    """Sources of messages that have arrived and that nobody has received."""
    got: tuple[int, ...] = ()
    """What the program has received."""
    held: bool = False
    targets: Counts | None = None
    closed: bool = False
    inbox: tuple[Any, ...] = ()
    """From the coordinator."""
    outbox: tuple[Any, ...] = ()
    """To the coordinator."""

    def may_enter(self, key: str, number: int) -> bool:
        """Whether the clock lets it."""
        return not self.held or number <= _count(self.targets or (), key)


@dataclass(frozen=True, slots=True)
class World:
    """Everything at one moment."""

    ranks: tuple[Rank, ...]
    wire: tuple[tuple[int, int, tuple[str, int] | None], ...] = ()
    """(source, destination, of which collective it is a part) of messages under way; those of one pair arrive in order.
    """
    round: Round | None = None
    cut: tuple[Rank, ...] | None = None
    """The ranks when the last one had written its image."""


class Job:
    """The scripts and who is in which communicator: what does not change."""

    def __init__(
        self, scripts: tuple[Script, ...], members: Mapping[str, tuple[int, ...]], *, has_clock: bool = True
    ) -> None:
        self.scripts = scripts
        self.has_clock = has_clock
        self.members = members
        self.start = World(tuple(Rank(sent=(0,) * len(scripts), received=(0,) * len(scripts)) for _ in scripts))
        self.never_ends = any(("spin", None) in script for script in scripts)

    # --- what can happen next ---

    def successors(self, world: World, *, stop: bool) -> Iterator[World]:
        """Every world that one event makes of this one.

        What the coordinator does with an answer touches nothing that another event reads, so it comes first.
        """
        if any(rank.outbox for rank in world.ranks):
            yield from self._coordinate(world)
            return
        for me in range(len(self.scripts)):
            yield from self.run_program(world, me)
            yield from self._hear(world, me)
        yield from self.deliver(world)
        if world.round is None:
            begun = Round(len(self.scripts), stop, limit_s=1e9)
            yield self._perform(world, *begun.begin(0.0))

    def run_program(self, world: World, me: int) -> Iterator[World]:
        """The rank goes one operation on, or one of its collectives ends, if that can be."""
        rank = world.ranks[me]
        for key, number in rank.open:
            if self._can_end(world, me, key, number):
                left = tuple(one for one in rank.open if one != (key, number))
                yield _with(world, me, replace(rank, open=left, done=tuple(sorted((*rank.done, (key, number))))))
        # What is complete is told when the rank is open again.
        if rank.position < len(self.scripts[me]) and not rank.closed:
            yield from self._operate(world, me)

    def _operate(self, world: World, me: int) -> Iterator[World]:
        rank = world.ranks[me]
        kind, what = self.scripts[me][rank.position]
        if kind in _COLLECTIVE:
            yield from self._collective(world, me, kind, what)
        elif kind == "wait":
            if not any(key == what for key, _ in rank.open):
                yield _with(world, me, _on(rank))
        elif kind == "free":
            freed = (*rank.freed, (what, _count(rank.entered, what)))
            yield _with(world, me, replace(_on(rank), entered=_without(rank.entered, what), freed=freed))
        elif kind == "send":
            yield _send(_with(world, me, _on(rank)), me, what, None)
        elif kind == "recv":
            place = next((i for i, source in enumerate(rank.queue) if what in (None, source)), None)
            if place is not None:
                rest = rank.queue[:place] + rank.queue[place + 1 :]
                got = (*rank.got, rank.queue[place])
                yield _with(world, me, replace(_on(rank), queue=rest, got=got))

    def _collective(self, world: World, me: int, kind: str, key: str) -> Iterator[World]:
        """Enter it, or go on behind it."""
        rank = world.ranks[me]
        number = _count(rank.entered, key)
        if (key, number) in rank.small:
            others = [(key, number, other) for other in self._givers(kind, key) if other != me]
            if set(others) <= set(rank.parts):
                parts = tuple(part for part in rank.parts if part not in others)
                yield _with(world, me, replace(_on(rank), small=(), parts=parts))
        elif (key, number) in rank.done and kind != "start" and self._is_inside(rank, me):
            yield _with(world, me, _on(rank))
        elif not self._is_inside(rank, me) and (not self.has_clock or rank.may_enter(key, number + 1)):
            this = (key, number + 1)
            entered = replace(rank, entered=_plus_one(rank.entered, key))
            if kind in ("small", "give"):
                following = _with(world, me, replace(entered, small=(this,)))
                for other in self.members[key] if me in self._givers(kind, key) else ():
                    following = following if other == me else _send(following, me, other, this)
                yield following
            else:
                entered = replace(entered, open=(*rank.open, this), begun=tuple(sorted((*rank.begun, this))))
                yield _with(world, me, _on(entered) if kind == "start" else entered)

    def _givers(self, kind: str, key: str) -> tuple[int, ...]:
        return self.members[key][:1] if kind == "give" else self.members[key]

    def _is_inside(self, rank: Rank, me: int) -> bool:
        """Whether it has entered the collective where it stands: more of its key have been entered than lie behind."""
        kind, key = self._next_of(rank, me)
        behind = sum(one == key and what in _COLLECTIVE for what, one in self.scripts[me][: rank.position])
        return kind in _COLLECTIVE and kind != "start" and _count(rank.entered, key) > behind

    def _can_end(self, world: World, me: int, key: str, number: int) -> bool:
        """Whether the network has done what this member needs of a collective."""
        members = self.members[key]
        has_begun = {member for member in members if (key, number) in world.ranks[member].begun}
        if self._kind_of(me, key, number) != "tell":
            return has_begun == set(members)
        return me == members[0] or members[0] in has_begun

    def _kind_of(self, me: int, key: str, number: int) -> str:
        return [kind for kind, what in self.scripts[me] if what == key and kind in _COLLECTIVE][number - 1]

    def deliver(self, world: World) -> Iterator[World]:
        """A message arrives: the first one of any pair."""
        seen = set()
        for place, (source, destination, part) in enumerate(world.wire):
            if (source, destination) in seen:
                continue
            seen.add((source, destination))
            rank = world.ranks[destination]
            received = tuple(n + (whom == source) for whom, n in enumerate(rank.received))
            if part is None:
                taken = replace(rank, received=received, queue=(*rank.queue, source))
            else:
                taken = replace(rank, received=received, parts=tuple(sorted((*rank.parts, (*part, source)))))
            rest = world.wire[:place] + world.wire[place + 1 :]
            yield replace(_with(world, destination, taken), wire=rest)

    def _hear(self, world: World, me: int) -> Iterator[World]:
        rank = world.ranks[me]
        if not rank.inbox:
            return
        message, *rest = rank.inbox
        rank = replace(rank, inbox=tuple(rest))
        if isinstance(message, Ask):
            rank = replace(rank, held=True, targets=message.targets, closed=message.step is RoundPhase.CLOSE)
            rank = replace(rank, outbox=(*rank.outbox, (message.wave, self._status(world, rank, me))))
        elif isinstance(message, TakeImage):
            rank = replace(rank, outbox=(*rank.outbox, "imaged"))
        else:
            rank = replace(rank, held=False, targets=None, closed=False)
        yield _with(world, me, rank)

    def _status(self, world: World, rank: Rank, me: int) -> Status:
        if self.has_clock:
            return self._status_by_clock(world, rank, me)
        counts = {WORLD: 0, **dict(rank.entered)} if WORLD in self.members else dict(rank.entered)
        known = {key: count for key, count in counts.items() if self._is_known(world, key)}
        told = tuple((key, CollectiveProgress(count, _ended(rank, key, count))) for key, count in sorted(known.items()))
        messages = (pairs(rank.sent), pairs(rank.received))
        return Status(me, Activity.COMPUTING, (), (), *messages, closed=rank.closed, collectives=told)

    def _is_known(self, world: World, key: str) -> bool:
        """Whether all members have heard that all use it."""
        ranks = [(world.ranks[member], member) for member in self.members[key]]
        return key == WORLD or all(self._has_entered(rank, member, key) for rank, member in ranks)

    def _has_entered(self, rank: Rank, me: int, key: str) -> bool:
        behind = self.scripts[me][: rank.position]
        return _count(rank.entered, key) > 0 or any(one == key and kind in _COLLECTIVE for kind, one in behind)

    def _status_by_clock(self, world: World, rank: Rank, me: int) -> Status:
        targets = dict(rank.targets or ())
        loose = {one for one in rank.open if self.can_begin_anew(me, *one) and one[1] > targets.get(one[0], 0)}
        kind, what = self._next_of(rank, me)
        enters = kind in _COLLECTIVE and not self._is_inside(rank, me)
        is_held = enters and not rank.may_enter(what, _count(rank.entered, what) + 1)
        waits = (kind == "wait" or self._is_inside(rank, me)) and any(key == what for key, _ in loose)
        if set(rank.open) - loose:
            activity = Activity.INSIDE
        elif kind == "end":
            activity = Activity.FINISHED
        else:
            activity = Activity.HELD if is_held or waits else Activity.COMPUTING
        at = tuple(sorted({*(key for key, _ in loose), *([what] if is_held else [])}))
        messages = (pairs(rank.sent), pairs(rank.received))
        quiet = activity is not Activity.INSIDE
        return Status(me, activity, at, self._standings(rank, me), *messages, quiet=quiet, closed=rank.closed)

    def _standings(self, rank: Rank, me: int) -> tuple[tuple[str, ClockProgress], ...]:
        made = {key for script in self.scripts for kind, key in script if kind == "make"}
        entered = {key: 0 for key in self.members if me in self.members[key] and key not in made} | dict(rank.entered)
        known = {key: ClockProgress(count, count, (), count) for key, count in rank.freed}
        for key, count in entered.items():
            if key in known:
                continue
            open_numbers = [number for name, number in rank.open if name == key]
            completed = count
            while completed in open_numbers and self.can_begin_anew(me, key, completed):
                completed -= 1
            known[key] = ClockProgress(completed, min(open_numbers, default=count + 1) - 1, self.members[key], count)
        return tuple(sorted(known.items(), key=lambda item: item[0]))

    def _next_of(self, rank: Rank, me: int) -> tuple[str, Any]:
        script = self.scripts[me]
        return script[rank.position] if rank.position < len(script) else ("end", None)

    def can_begin_anew(self, me: int, key: str, number: int) -> bool:
        """Whether a cut drops it on this rank if it has not ended."""
        kind = self._kind_of(me, key, number)
        return kind not in _HAS_TO_END and not (kind == "tell" and me == self.members[key][0])

    # --- the coordinator ---

    def _coordinate(self, world: World) -> Iterator[World]:
        """Take one answer. Which one comes first changes nothing, so the first rank's is taken; time is a choice."""
        assert world.round is not None
        for me, rank in enumerate(world.ranks):
            if not rank.outbox:
                continue
            message, *rest = rank.outbox
            taken = _with(world, me, replace(rank, outbox=tuple(rest)))
            if message == "imaged":
                after = taken.round.on_imaged(me, "")
                if isinstance(after[1][:1], tuple) and after[1] and isinstance(after[1][0], Commit):
                    taken = replace(taken, cut=taken.ranks)
                    after = after[0].on_committed("")
                yield self._perform(taken, *after)
            else:
                wave, status = message
                seen = set()
                for now_s in (0.0, 1.0):
                    made = self._perform(taken, *taken.round.on_status(status, wave, now_s))
                    if made not in seen:
                        seen.add(made)
                        yield made
            return

    def _perform(self, world: World, state: Round, instructions: tuple[Any, ...]) -> World:
        # What only counts or tells the time would make endless worlds out of the same few. No answer is ever late here,
        # so one number does for all waves.
        state = replace(state, changed_s=0.0, started_s=0.0, num_raises=0, wave=0, reason="")
        for instruction in instructions:
            told = instruction
            if isinstance(told, Ask):
                told = replace(told, wave=0, after_s=0.0)
            elif isinstance(told, End):
                told = End(told.ending, "")
            world = replace(world, ranks=tuple(replace(r, inbox=(*r.inbox, told)) for r in world.ranks))
        return replace(world, round=state)

    # --- after the cut ---

    def restart(self, cut: tuple[Rank, ...]) -> World:
        """The job as it begins anew from a cut: nothing of the network, the counts, or the round is left."""
        fresh = [replace(rank, begun=rank.open, held=False, targets=None, closed=False) for rank in cut]
        return World(tuple(replace(rank, freed=(), inbox=(), outbox=()) for rank in fresh))

    def run_to_end(self, world: World) -> World:
        """Let it run without a checkpoint, first rank first, until nothing moves. What spins has ended at last."""
        moved = True
        while moved:
            moved = False
            ends = (self._end_spin(world, me) for me in range(len(self.scripts)))
            runs = (self.run_program(world, me) for me in range(len(self.scripts)))
            for step in (*runs, self.deliver(world), *ends):
                following = next(step, None)
                if following is not None:
                    world, moved = following, True
                    break
        return world

    def _end_spin(self, world: World, me: int) -> Iterator[World]:
        rank = world.ranks[me]
        if rank.position < len(self.scripts[me]) and self.scripts[me][rank.position][0] == "spin":
            yield _with(world, me, _on(rank))

    def is_complete(self, world: World) -> bool:
        """Whether every program has come to its end."""
        return all(rank.position == len(script) for rank, script in zip(world.ranks, self.scripts, strict=True))


@dataclass(frozen=True, slots=True)
class Explored:
    """All worlds that can be."""

    worlds: int
    cuts: frozenset[tuple[Rank, ...]]
    dead_ends: tuple[World, ...]
    """Worlds from which no end can be reached any more: every one is a fault."""


def explore(job: Job, *, stop: bool, most: int = 200_000) -> Explored:
    """Visit every world; raises RuntimeError beyond ``most``."""
    before: dict[World, list[World]] = {job.start: []}
    ends: list[World] = []
    cuts: set[tuple[Rank, ...]] = set()
    todo = deque([job.start])
    while todo:
        world = todo.popleft()
        if world.cut is not None:
            cuts.add(world.cut)
        stopped = stop and world.cut is not None
        is_over = world.round is not None and world.round.phase is RoundPhase.DONE
        if stopped or (is_over and (job.never_ends or job.is_complete(world))):
            ends.append(world)
        if stopped:
            continue
        for following in job.successors(world, stop=stop):
            if following not in before:
                before[following] = []
                todo.append(following)
                if len(before) > most:
                    raise RuntimeError(f"more than {most} worlds")
            before[following].append(world)
    alive = set(ends)
    todo = deque(ends)
    while todo:
        for earlier in before[todo.popleft()]:
            if earlier not in alive:
                alive.add(earlier)
                todo.append(earlier)
    return Explored(len(before), frozenset(cuts), tuple(world for world in before if world not in alive))


def _with(world: World, me: int, rank: Rank) -> World:
    return replace(world, ranks=(*world.ranks[:me], rank, *world.ranks[me + 1 :]))


def _on(rank: Rank) -> Rank:
    return replace(rank, position=rank.position + 1)


def _send(world: World, source: int, destination: int, part: tuple[str, int] | None) -> World:
    rank = world.ranks[source]
    sent = tuple(n + (to == destination) for to, n in enumerate(rank.sent))
    sender = _with(world, source, replace(rank, sent=sent))
    return replace(sender, wire=(*sender.wire, (source, destination, part)))


def _ended(rank: Rank, key: str, entered: int) -> int:
    """Up to which number all are complete; what is made of messages waits for nobody."""
    return min((number - 1 for name, number in rank.open if name == key), default=entered)


def _without(counts: Counts, key: str) -> Counts:
    return tuple((name, count) for name, count in counts if name != key)


def _count(counts: Counts, key: str) -> int:
    return dict(counts).get(key, 0)


def _plus_one(counts: Counts, key: str) -> Counts:
    return tuple(sorted({**dict(counts), key: _count(counts, key) + 1}.items()))
