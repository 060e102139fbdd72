"""Failover of the job's store: to which agent the survivors move, and the quorum that they need. Pure rules.

`remesh.elasticity.store` is the shell.

Every agent runs a store of its own, empty and idle. The one that the endpoint names is active first. When the active
store is lost, the agents of the last generation move to the store of the lowest of them that answers. A *place* is a
store together with the number of the move to it: places are ordered, and no agent goes back to an earlier one.

    lost ──> look at all nodes: the old store answers again      -> return to it
                                a later place is open somewhere   -> join it
                                else register with the lowest agent that answers
             enough have registered there                        -> open it: a set-once key of that store

*Quorum.* A partition must not make two jobs of one, so every decision needs enough nodes of a *base*: the generation
that ran last. Nodes whose agents are proved to be gone (their port refuses connections, or they left on request) do not
count. More than half of the others is enough anywhere; exactly half only where that generation was decided. Two
sides that both had enough would share a node, and a node is in one place at a time.

Was the last generation ever alive? All ranks take part in every step, so it was if any node holds a later step than it
began with. If that is not known, the bases of its own decision must agree as well; it may have run, or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The place of a store: a host, and the number of moves before it. Later places are greater.

    >>> Place(1, 7) > Place(0, -1)
    True
    """

    epoch: int = 0
    """How many moves led here; 0 for the store that the endpoint names."""
    host: int = -1
    """Index of the node whose agent hosts it; -1 for the first place, on any host."""

    def to_json(self) -> dict[str, int]:
        return asdict(self)


FIRST_PLACE = Place()
_EPOCH_INDICES = 1 << 20
"""More than the nodes that register in one place."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A place, and what was known when it was opened."""

    place: Place = FIRST_PLACE
    latest: int = 0
    """The newest generation then: earlier ones are not in this store."""
    nodes: tuple[int, ...] = ()
    """Nodes that had registered elsewhere before."""

    first_index: int = 0
    """Index of the first node that registers here."""

    @classmethod
    def at(cls, place: Place, latest: int, nodes: Collection[int]) -> Opening:
        """A later place, whose nodes get indices of their own."""
        return cls(place, latest, tuple(sorted(nodes)), place.epoch * _EPOCH_INDICES)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Opening:
        nodes = tuple(map(int, value["nodes"]))
        return cls(Place(**value["place"]), int(value["latest"]), nodes, int(value["first_index"]))


@dataclass(frozen=True, slots=True)
class Base:
    """Nodes of which a decision needs enough."""

    nodes: tuple[int, ...]
    place: Place
    """Where these nodes' generation was decided."""

    def to_json(self) -> dict[str, Any]:
        return {"nodes": list(self.nodes), "place": self.place.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Base:
        return cls(tuple(value["nodes"]), Place(**value["place"]))


def describe_missing_quorum(
    bases: Sequence[Base], present: Collection[int], gone: Collection[int], place: Place | None
) -> str | None:
    """Why ``present`` may not decide alone; None when it may. ``place`` is where it is to decide, None for a new one.

    >>> base = Base((0, 1, 2), Place())
    >>> describe_missing_quorum([base], [0, 1], [], None), describe_missing_quorum([base], [2], [0], None)
    (None, '1 of 2 nodes that may be alive are here, more than half are needed')
    >>> describe_missing_quorum([base], [2], [0, 1], None)
    """
    for base in bases:
        counted = set(base.nodes).difference(gone)
        here = counted.intersection(present)
        is_half_enough = base.place == place
        if 2 * len(here) + is_half_enough <= len(counted) and counted:
            need = "half" if is_half_enough else "more than half"
            return f"{len(here)} of {len(counted)} nodes that may be alive are here, {need} are needed"
    return None


FIRST_OPENING = Opening()


# --- The search for another store ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standby:
    """What an agent's own store holds when it is read."""

    opened: Place | None
    """The place that it is, once it was opened."""
    movers: frozenset[int]
    """Nodes that have registered with it."""


REFUSED = "refuses connections"
SILENT = "does not answer"
Answer = Standby | str
"""A standby, or one of REFUSED and SILENT."""


@dataclass(frozen=True, slots=True)
class Return:
    """The old store answers again."""


@dataclass(frozen=True, slots=True)
class Join:
    """Another place is open."""

    place: Place


@dataclass(frozen=True, slots=True)
class Register:
    """Write into a node's store that this node would move there."""

    host: int


@dataclass(frozen=True, slots=True)
class Open:
    """Enough have registered: propose that this place is in force from now on."""

    place: Place


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Look again soon."""

    reason: str


Move = Return | Join | Register | Open | LookAgain


def decide_move(
    index: int, place: Place, bases: Sequence[Base], *, old_answers: bool, answers: Mapping[int, Answer]
) -> Move:
    """What agent ``index``, which lost the store in force, does next.

    ``answers`` has what was found at each node of the bases in this round, and at other nodes whose store may be open.
    """
    if old_answers:
        return Return()
    standbys = {node: answer for node, answer in answers.items() if isinstance(answer, Standby)}
    opened = [standby.opened for standby in standbys.values() if standby.opened is not None]
    if opened and max(opened) > place:
        return Join(max(opened))
    idle = sorted(node for node, standby in standbys.items() if standby.opened is None)
    if not idle:
        return LookAgain("no agent answers")
    host = idle[0]
    movers = standbys[host].movers
    if index not in movers:
        return Register(host)
    gone = [node for node, answer in answers.items() if answer == REFUSED]
    missing = describe_missing_quorum(bases, movers, gone, None)
    return Open(Place(place.epoch + 1, host)) if missing is None else LookAgain(missing)
