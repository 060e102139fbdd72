"""Baselines of sender choice and order: the published algorithms, by name.

Model of all of them. A *multicast* takes one slice whole from one sender host to all its receiver hosts, in a time
that its bytes give. It is *exclusive*: from start to finish it occupies the NIC of its sender (outwards) and of every
receiver (inwards). An algorithm chooses the sender host of every multicast and an *order*; each multicast then starts
as soon as all earlier ones that share a NIC with it have finished (`place`).

- `naive`: the host of the lowest device that holds the slice; order of the slices.
- `load_balance`: longest first, each to its least loaded owner; the paper fixes no order, so slices keep theirs.
- `dfs`: depth-first search over senders and orders. A branch is cut when a bound that no completion of it beats is
  not below the best finish so far. The budget is a number of nodes, so that plans do not depend on a clock; what is
  best by then is returned, at least the naive order.
- `random_greedy`: draw an order of what is left, take every multicast that fits beside those taken, with a random
  free sender; of many draws keep the one that occupies most devices; append it, repeat.
- `alpa`: the same with the choices of Alpa's code: senders are drawn with weight (largest load - load + 1), a
  multicast whose sender is taken waits, the draw with most multicasts is kept, then the one with the most even loads.
  Alpa weighs by whole source tiles where slices are meant; here slices count, which is kinder to it.

Chance is a seeded generator, so every rank and every run gets the same order. Rates of hosts play no part: neither
source knows them.

Sources: Zhuang et al., arXiv 2211.05322, section 3 and appendix; Alpa's cross-mesh resharding (2023).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from remesh.resharding.schedule.senders import assign_whole

DEFAULT_NODES = 20_000
"""Nodes that `dfs` may look at."""
_SEED = 0
_NUM_DRAWS = 100
"""Orders drawn for each step of the two greedy algorithms, as Alpa's code draws ..."""
_MAX_LOOKS = 20_000
"""... unless so many tasks are left that they would look at more of them than this."""


@dataclass(frozen=True, slots=True)
class MulticastTask:
    """One slice at host level."""

    owners: tuple[str, ...]
    """Hosts that hold it, the one with the lowest device first. Invariant: at least one."""
    receivers: tuple[str, ...]
    """Hosts that want it and do not hold it, ascending. Invariant: at least one."""
    duration: int
    """Time it takes, in bytes through one NIC. Invariant: > 0."""
    num_takers: int = 1
    """Devices that want it."""


@dataclass(frozen=True, slots=True)
class Multicast:
    """A slice with its sender and its time."""

    task: int
    """Number of the task."""
    sender: str
    """Invariant: owns the task."""
    start: int
    finish: int


@dataclass(frozen=True, slots=True)
class Order:
    """What an algorithm answers."""

    multicasts: tuple[Multicast, ...]
    """In order. Invariant: each task once; those that share a NIC do not overlap in time."""

    @property
    def finish(self) -> int:
        """The end of the last multicast, in bytes through one NIC."""
        return max((each.finish for each in self.multicasts), default=0)


def place(tasks: Sequence[MulticastTask], chosen: Iterable[tuple[int, str]]) -> Order:
    """Times of multicasts, given as (task, sender) in order: each starts when all its NICs are free.

    >>> tasks = [MulticastTask(("a",), ("c",), 2), MulticastTask(("b",), ("c", "d"), 3)]
    >>> [(each.sender, each.start, each.finish) for each in place(tasks, [(0, "a"), (1, "b")]).multicasts]
    [('a', 0, 2), ('b', 2, 5)]
    """
    free_at: dict[tuple[str, str], int] = {}
    placed = []
    for number, sender in chosen:
        nics = _nics(tasks[number], sender)
        start = max(free_at.get(nic, 0) for nic in nics)
        finish = start + tasks[number].duration
        free_at.update(dict.fromkeys(nics, finish))
        placed.append(Multicast(number, sender, start, finish))
    return Order(tuple(placed))


def _nics(task: MulticastTask, sender: str) -> list[tuple[str, str]]:
    return [(sender, "out"), *((host, "in") for host in task.receivers)]


def naive(tasks: Sequence[MulticastTask]) -> Order:
    """The lowest device sends, in the order of the slices."""
    return place(tasks, ((number, task.owners[0]) for number, task in enumerate(tasks)))


def load_balance(tasks: Sequence[MulticastTask]) -> Order:
    """Loads of senders balanced, order left as it is."""
    hosts = sorted({host for task in tasks for host in task.owners})
    candidates = [sorted(map(hosts.index, task.owners)) for task in tasks]
    chosen = assign_whole([task.duration for task in tasks], candidates)
    return place(tasks, ((number, hosts[sender]) for number, sender in enumerate(chosen)))


def dfs(tasks: Sequence[MulticastTask], *, max_nodes: int = DEFAULT_NODES) -> Order:
    """The best order that depth-first search finds while it looks at ``max_nodes`` placements.

    Starts never fall along a branch and equal tasks are placed by number: every schedule in which nothing could start
    earlier has one such order, so nothing is lost and most permutations are spared.
    """
    best = naive(tasks)
    search = _Search(tasks)
    if search.bound() >= best.finish:
        return best
    levels: list[Iterator[tuple[int, str, int]]] = [search.children()]
    for _ in range(max_nodes):
        step = next(levels[-1], None)
        while step is None:
            levels.pop()
            if not levels:
                return best
            search.undo()
            step = next(levels[-1], None)
        search.do(*step)
        if search.bound() >= best.finish:
            search.undo()
        elif len(search.chosen) == len(tasks):
            best = Order(tuple(search.chosen))
            search.undo()
        else:
            levels.append(search.children())
    return best


class _Search:
    """A branch of the depth-first search: what is placed, and what that leaves."""

    def __init__(self, tasks: Sequence[MulticastTask]) -> None:
        self._tasks = tasks
        classes: dict[MulticastTask, list[int]] = {}
        for number in range(len(tasks) - 1, -1, -1):
            classes.setdefault(tasks[number], []).append(number)
        self._left = list(classes.values())
        """Numbers of equal tasks not yet placed, lowest last."""
        self._class_of = {number: at for at, numbers in enumerate(self._left) for number in numbers}
        self._free_at: dict[tuple[str, str], int] = {}
        self._undo: list[dict[tuple[str, str], int]] = []
        self._to_take: dict[str, int] = {}
        """Time that each receiver host has yet to receive."""
        self._to_give: dict[str, int] = {}
        """Time that each host has yet to send because no other host can."""
        self._owners_left: dict[str, int] = {}
        """Tasks not yet placed that each host may send."""
        self._total_left = 0
        self.chosen: list[Multicast] = []
        """What is placed, in order."""
        for task in tasks:
            self._account(task, 1)

    def children(self) -> Iterator[tuple[int, str, int]]:
        """Every (task, sender, start) that may come next, lowest task first."""
        last = self.chosen[-1] if self.chosen else Multicast(-1, "", 0, 0)
        for number in sorted(numbers[-1] for numbers in self._left if numbers):
            for sender in self._tasks[number].owners:
                start = max(self._free_at.get(nic, 0) for nic in _nics(self._tasks[number], sender))
                if (start, number) > (last.start, last.task):
                    yield number, sender, start

    def do(self, number: int, sender: str, start: int) -> None:
        """Place a task."""
        task = self._tasks[number]
        nics = _nics(task, sender)
        self._undo.append({nic: self._free_at.get(nic, 0) for nic in nics})
        self._free_at.update(dict.fromkeys(nics, start + task.duration))
        self.chosen.append(Multicast(number, sender, start, start + task.duration))
        self._left[self._class_of[number]].pop()
        self._account(task, -1)

    def undo(self) -> None:
        """Take the last task back."""
        number = self.chosen.pop().task
        self._free_at.update(self._undo.pop())
        self._left[self._class_of[number]].append(number)
        self._account(self._tasks[number], 1)

    def bound(self) -> int:
        """A finish that no completion of this branch beats: nothing that is left may start before the last start."""
        now = self.chosen[-1].start if self.chosen else 0
        done = max(self._free_at.values(), default=0)
        taking = max((self._from((host, "in"), now) + left for host, left in self._to_take.items()), default=0)
        giving = max((self._from((host, "out"), now) + left for host, left in self._to_give.items()), default=0)
        senders = [host for host, left in self._owners_left.items() if left]
        together = self._total_left + sum(self._from((host, "out"), now) for host in senders)
        return max(done, taking, giving, -(-together // len(senders)) if senders else 0)

    def _from(self, nic: tuple[str, str], now: int) -> int:
        return max(self._free_at.get(nic, 0), now)

    def _account(self, task: MulticastTask, sign: int) -> None:
        self._total_left += sign * task.duration
        for host in task.receivers:
            self._to_take[host] = self._to_take.get(host, 0) + sign * task.duration
        for host in task.owners:
            self._owners_left[host] = self._owners_left.get(host, 0) + sign
            alone = task.duration if len(task.owners) == 1 else 0
            self._to_give[host] = self._to_give.get(host, 0) + sign * alone


@dataclass(slots=True)
class _Draw:
    """Multicasts that fit beside each other, with what they change."""

    chosen: list[tuple[int, str]] = field(default_factory=list)
    busy: set[tuple[str, str]] = field(default_factory=set)
    load: dict[str, int] = field(default_factory=dict)
    """Time sent by every host so far, this draw included."""
    num_devices: int = 0
    """Senders and takers that it occupies."""

    def add(self, number: int, task: MulticastTask, sender: str) -> bool:
        """Take a multicast if its NICs are free; whether they were."""
        nics = _nics(task, sender)
        if not self.busy.isdisjoint(nics):
            return False
        self.busy.update(nics)
        self.chosen.append((number, sender))
        self.load[sender] = self.load.get(sender, 0) + task.duration
        self.num_devices += 1 + task.num_takers
        return True


def random_greedy(tasks: Sequence[MulticastTask]) -> Order:
    """Sets of multicasts that fit beside each other, each the draw that occupies most devices."""
    chance = random.Random(_SEED)

    def sender_of(task: MulticastTask, draw: _Draw) -> str:
        free = [host for host in task.owners if (host, "out") not in draw.busy]
        return chance.choice(free or task.owners)

    return _by_draws(tasks, chance, sender_of, lambda draw: (draw.num_devices, 0.0))


def alpa(tasks: Sequence[MulticastTask]) -> Order:
    """Sets of multicasts as Alpa's code chooses them."""
    chance = random.Random(_SEED)

    def sender_of(task: MulticastTask, draw: _Draw) -> str:
        loads = [draw.load.get(host, 0) for host in task.owners]
        return chance.choices(task.owners, [max(loads) - load + 1 for load in loads])[0]

    return _by_draws(tasks, chance, sender_of, lambda draw: (len(draw.chosen), -_variance(draw.load)))


def _by_draws(
    tasks: Sequence[MulticastTask],
    chance: random.Random,
    sender_of: Callable[[MulticastTask, _Draw], str],
    worth_of: Callable[[_Draw], tuple[int, float]],
) -> Order:
    load = dict.fromkeys(sorted({host for task in tasks for host in task.owners}), 0)
    left = list(range(len(tasks)))
    chosen: list[tuple[int, str]] = []
    while left:
        best: _Draw | None = None
        for _ in range(max(1, min(_NUM_DRAWS, _MAX_LOOKS // len(left)))):
            draw = _Draw(load=dict(load))
            for number in chance.sample(left, len(left)):
                draw.add(number, tasks[number], sender_of(tasks[number], draw))
            if best is None or worth_of(draw) > worth_of(best):
                best = draw
        assert best is not None
        chosen += best.chosen
        load = best.load
        taken = {number for number, _ in best.chosen}
        left = [number for number in left if number not in taken]
    return place(tasks, chosen)


def _variance(load: Mapping[str, int]) -> float:
    mean = sum(load.values()) / len(load)
    return sum((each - mean) ** 2 for each in load.values())


ALGORITHMS: Mapping[str, Callable[[Sequence[MulticastTask]], Order]] = {
    "naive": naive,
    "load_balance": load_balance,
    "dfs": dfs,
    "random_greedy": random_greedy,
    "alpa": alpa,
}
"""Every baseline by its name."""
