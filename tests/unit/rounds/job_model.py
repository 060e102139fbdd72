"""A job in a box: ranks that run small scripts, a network, and the rounds of ``remesh.comm``, one event at a time.

Every choice that a real job leaves to chance is a choice here: which rank runs, which message arrives, when a rank
hears of the checkpoint, whether a wave finds that nothing moves. `explore` walks all of them. A script is a tuple of
operations: ``("send", rank)``, ``("recv", rank or None)``, ``("coll", key)``, ``("tell", key)``, ``("free", key)``,
``("forget", key)``. A collective ends for a member once all members are inside it or past it: the strictest kind; one
that tells ends without the others, unless it is the first of its key. A lower half that has forgotten what was freed
does not say any more that it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remesh.rounds.machine import Ask, Commit, End, Round, RoundPhase, TakeImage
from remesh.rounds.status import Activity, Entered, Status, pairs

Counts = tuple[tuple[str, int], ...]
Script = tuple[tuple[str, Any], ...]
_COLLECTIVE = ("coll", "tell")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: its program, and what its lower half knows."""

    position: int = 0
    inside: bool = False
    entered: Counts = ()
    """Collectives entered."""
    real: Counts = ()
    """The same, also on what has been freed."""
    freed: Counts = ()
    """Collectives that were entered on what has been freed, until that is forgotten."""
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


@dataclass(frozen=True, slots=True)
class World:
    """Everything at one moment."""

    ranks: tuple[Rank, ...]
    wire: tuple[tuple[int, int], ...] = ()
    """(source, destination) of messages under way; those of one pair arrive in order."""
    round: Round | None = None
    cut: tuple[Rank, ...] | None = None
    """The ranks when the last one had written its image."""


class Job:
    """The scripts and who is in which communicator: what does not change."""

    def __init__(self, scripts: tuple[Script, ...], members: Mapping[str, tuple[int, ...]]) -> None:
        self.scripts = scripts
        self.members = members
        self.start = World(tuple(Rank(sent=(0,) * len(scripts), received=(0,) * len(scripts)) for _ in scripts))

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
        """The rank goes one operation on, if it can."""
        rank = world.ranks[me]
        if rank.position == len(self.scripts[me]):
            return
        kind, what = self.scripts[me][rank.position]
        if kind in _COLLECTIVE:
            yield from self._collective(world, me, what)
        elif rank.closed:
            return
        elif kind in ("free", "forget"):
            kept = ((what, _count(rank.entered, what)),) if kind == "free" else ()
            known = {"entered": _without(rank.entered, what), "freed": (*_without(rank.freed, what), *kept)}
            yield _with(world, me, replace(rank, position=rank.position + 1, **known))
        elif kind == "send":
            counts = tuple(n + (to == what) for to, n in enumerate(rank.sent))
            moved = replace(rank, position=rank.position + 1, sent=counts)
            yield replace(_with(world, me, moved), wire=(*world.wire, (me, what)))
        else:
            place = next((i for i, source in enumerate(rank.queue) if what in (None, source)), None)
            if place is not None:
                rest = rank.queue[:place] + rank.queue[place + 1 :]
                got = (*rank.got, rank.queue[place])
                yield _with(world, me, replace(rank, position=rank.position + 1, queue=rest, got=got))

    def _collective(self, world: World, me: int, key: str) -> Iterator[World]:
        rank = world.ranks[me]
        others = [world.ranks[member] for member in self.members[key]]
        count = _count(rank.entered, key)
        if rank.inside:
            is_alone = self.scripts[me][rank.position][0] == "tell" and count > 1
            if is_alone or all(_count(other.real, key) >= count for other in others):
                yield _with(world, me, replace(rank, inside=False, position=rank.position + 1))
        elif not rank.closed and (not rank.held or count < _count(rank.targets or (), key)):
            more = {"entered": _plus_one(rank.entered, key), "real": _plus_one(rank.real, key)}
            yield _with(world, me, replace(rank, inside=True, **more))

    def deliver(self, world: World) -> Iterator[World]:
        """A message arrives: the first one of any pair."""
        seen = set()
        for place, (source, destination) in enumerate(world.wire):
            if (source, destination) in seen:
                continue
            seen.add((source, destination))
            rank = world.ranks[destination]
            received = tuple(n + (whom == source) for whom, n in enumerate(rank.received))
            taken = replace(rank, received=received, queue=(*rank.queue, source))
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
            rank = replace(rank, outbox=(*rank.outbox, (message.wave, self._status(rank, me))))
        elif isinstance(message, TakeImage):
            rank = replace(rank, outbox=(*rank.outbox, "imaged"))
        else:
            rank = replace(rank, held=False, targets=None, closed=False)
        yield _with(world, me, rank)

    def _status(self, rank: Rank, me: int) -> Status:
        activity, at = Activity.COMPUTING, ()
        if rank.position == len(self.scripts[me]):
            activity = Activity.FINISHED
        else:
            kind, what = self.scripts[me][rank.position]
            if kind in _COLLECTIVE:
                at = (what,)
                activity = Activity.INSIDE if rank.inside else Activity.HELD
            elif kind == "recv":
                activity = Activity.WAITING
        counts = {**dict.fromkeys(at, 0), **dict(rank.entered)}
        known = {key: Entered(count, self.members[key]) for key, count in counts.items()}
        known |= {key: Entered(count, ()) for key, count in rank.freed}
        entered = tuple(sorted(known.items()))
        return Status(
            me, activity, at, entered, pairs(rank.sent), pairs(rank.received), not rank.inside, closed=rank.closed
        )

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
        fresh = []
        for rank in cut:
            entered = tuple((key, count) for key, count in rank.real if _count(rank.entered, key))
            fresh.append(replace(rank, entered=entered, held=False, targets=None, closed=False))
        return World(tuple(replace(rank, freed=(), inbox=(), outbox=()) for rank in fresh))

    def run_to_end(self, world: World) -> World:
        """Let it run without a checkpoint, first rank first, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for step in (*(self.run_program(world, me) for me in range(len(self.scripts))), self.deliver(world)):
                following = next(step, None)
                if following is not None:
                    world, moved = following, True
                    break
        return world

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
        if stopped or (world.round is not None and world.round.phase is RoundPhase.DONE and job.is_complete(world)):
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


def _without(counts: Counts, key: str) -> Counts:
    return tuple((name, count) for name, count in counts if name != key)


def _count(counts: Counts, key: str) -> int:
    return dict(counts).get(key, 0)


def _plus_one(counts: Counts, key: str) -> Counts:
    return tuple(sorted({**dict(counts), key: _count(counts, key) + 1}.items()))
