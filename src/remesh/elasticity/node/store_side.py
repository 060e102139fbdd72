"""Store access of an agent: its registration, heartbeats, views, and moves to another store.

A request that fails means that the store is lost. From then on no request is made, until `StoreSide.move` has found the
active store. What is read comes back as events for the agent's machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from remesh.elasticity.membership.instructions import Event, NodeDead, OutOfReach, StoreMoved
from remesh.elasticity.membership.view import StoreReader, Wants
from remesh.elasticity.model.failover import Place
from remesh.elasticity.model.generation import Generation, NodeInfo
from remesh.elasticity.model.outcome import Category, Outcome
from remesh.elasticity.store.home import MovingNode, StoreHome
from remesh.elasticity.store.shared import JobStore
from remesh.elasticity.telemetry.events import EventLog
from remesh.foundation.errors import PeerError
from remesh.wire.listening import is_listening

BEAT_INTERVAL_S = 0.5
BEATS_LOST = 10
"""A node whose heartbeat does not change for this many looks, one in each interval, is dead: 5 s, as TorchElastic's
keep-alive. Looks are counted and not seconds: an agent that was stopped, or waited for the store, has not looked, and
the others may have been held up by the same."""
EXIT_BARRIER_TIMEOUT_S = 300.0
"""How long an agent that is done waits for the others, as TorchElastic's exit barrier."""
_POLL_S = 0.01


class MovedBeforeError(Exception):
    """The job went on in another store before this node was in any generation of it: it is to join there, anew."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(f"the job goes on at {endpoint}")
        self.endpoint = endpoint


class Heartbeats:
    """What an agent has seen of the heartbeats of others."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float, int]] = {}
        """By node: its count, when that was seen first, and in how many looks it stood still since."""

    def keep(self, watched: Collection[int]) -> None:
        """Forget all others: an old count would make a node look dead that is watched again."""
        self._seen = {index: seen for index, seen in self._seen.items() if index in watched}

    def take(self, index: int, count: int, now_s: float) -> NodeDead | None:
        """One look at a node's count; that it is dead, if it has stood still for too many."""
        before, since_s, num_still = self._seen.get(index, (-1, now_s, 0))
        if count != before:
            self._seen[index] = (count, now_s, 0)
            return None
        self._seen[index] = (count, since_s, num_still + 1)
        if num_still < BEATS_LOST:
            return None
        return NodeDead(index, f"no heartbeat for {now_s - since_s:.1f} s", is_certain=False)


class StoreSide:
    """One agent's dealings with the store that is in force, under its index there."""

    def __init__(self, home: StoreHome, store: JobStore, index: int) -> None:
        self.shared = store
        """The store in force, the same object after every move."""
        self.index = index
        self._home = home
        self._reader = StoreReader(opening=home.opening)
        self._rung = -1
        self._next_beat_s = 0.0
        self._beats = Heartbeats()
        self._lost: dist.DistError | None = None
        """The error of the store's client when the store was lost; None while there is a store."""

    @classmethod
    def join(cls, home: StoreHome) -> StoreSide:
        """Connect to the store in force, and take a number there."""
        store = home.connect()
        return cls(home, store, home.next_index(store))

    def register(self, info: NodeInfo) -> None:
        """Publish this node's address and name."""
        self.shared.put(f"nodes/{self.index}", asdict(info))
        self._reader.nodes[self.index] = info
        self.shared.notify_change()

    @property
    def is_lost(self) -> bool:
        """Whether there is no store to write to."""
        return self._lost is not None

    @property
    def way(self) -> str:
        """The address at which processes of this node reach the current store."""
        return self._home.way

    @property
    def plan(self) -> Generation | None:
        """The newest generation that was seen."""
        return self._reader.plan

    def node(self, index: int) -> NodeInfo | None:
        """The identity that a node has written to the store; None if it has not."""
        return self._reader.node(self.shared, index)

    @contextlib.contextmanager
    def requests(self) -> Iterator[None]:
        """Around requests: one that fails ends them, and the store counts as lost."""
        try:
            yield
        except dist.DistError as error:
            self._lost = error

    def publish(self, key: str, value: Mapping[str, Any], *, once: bool) -> None:
        """Write a key; what cannot be written now, the machine publishes again in the next store."""
        if self._lost is None:
            with self.requests():
                (self.shared.put_once if once else self.shared.put)(key, value)
                self.shared.notify_change()

    def look(self, wants: Wants) -> list[Event]:
        """A new view, if a node has reported a change since the last."""
        rung = self.shared.num_changes()
        if rung == self._rung:
            return []
        self._rung = rung
        return [self._reader.read(self.shared, wants)]

    def beat(self, watched: Collection[int], log: EventLog) -> list[Event] | None:
        """Raise our heartbeat, and look at those that the machine watches; None when it is not yet time to."""
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return None
        self._next_beat_s = now_s + BEAT_INTERVAL_S
        self.shared.count(f"beat/{self.index}", by=1)
        for refusal in self._home.take_refusals():
            log.write("tls-refused", doing=refusal.doing, reason=refusal.reason)
        if (moved := self._home.read_moved(self.shared)) is not None:
            return self._follow(*moved, log)
        self._beats.keep(watched)
        return [*self._look_at_beats(watched)]

    def _look_at_beats(self, watched: Collection[int]) -> list[NodeDead]:
        looks = (self._beats.take(index, self.shared.count(f"beat/{index}"), time.monotonic()) for index in watched)
        return [dead for dead in looks if dead is not None]

    def probe(self, indices: Collection[int]) -> list[Event]:
        """Nodes where no agent listens any more: a refused connection proves it, silence proves nothing."""
        gone = [self._reader.nodes[index] for index in indices if self._is_listening(index) is False]
        return [NodeDead(one.index, f"its agent at {one.address}:{one.port} refuses connections") for one in gone]

    def places(self, indices: Collection[int]) -> list[tuple[str, int]]:
        """Address and port of these nodes' pulses, those that are known here. No communication."""
        known = (self._reader.nodes[index] for index in indices if index in self._reader.nodes)
        return [(node.address, node.port) for node in known]

    def move(self, log: EventLog) -> list[Event]:
        """The store is lost: find the one in force now. Blocks while it is looked for."""
        started_s, endpoint = time.monotonic(), self._home.endpoint
        reason = str(self._lost).partition("\n")[0]
        log.write("store-lost", endpoint=endpoint, reason=reason)
        found = self._home.move(self._mover())
        if found is None:
            why = "this node was in no mesh yet" if self._reader.plan is None else "too few nodes are here"
            text = (
                f"lost the store at {endpoint} ({reason}), which did not answer again, and {why} to go on without it; "
                "start the job again, it goes on from its last checkpoint"
            )
            return [OutOfReach(Outcome(Category.INFRASTRUCTURE, text))]
        return self._settle(found, time.monotonic() - started_s, log)

    def send_goodbye(self) -> None:
        """Wait until every other agent has finished or died: this one may host the store that all need to the end."""
        deadline_s, next_look_s = time.monotonic() + EXIT_BARRIER_TIMEOUT_S, 0.0
        with contextlib.suppress(RuntimeError):
            self.shared.put(f"bye/{self.index}", {})
            others = {index for index in self._reader.read_nodes(self.shared) if index != self.index}
            self._beats.keep(())
            while others and time.monotonic() < deadline_s:
                others -= {index for index in others if self.shared.get(f"bye/{index}") is not None}
                others -= {index for index in others if self._is_listening(index) is False}
                if (now_s := time.monotonic()) >= next_look_s:  # the address of a pod that is gone answers nothing
                    next_look_s = now_s + BEAT_INTERVAL_S
                    others -= {dead.index for dead in self._look_at_beats(others)}
                time.sleep(_POLL_S)

    def _is_listening(self, index: int) -> bool | None:
        """Whether a node's agent accepts a connection; None when nothing answers."""
        node = self.node(index)
        return None if node is None else is_listening(node.address, node.port)

    def _mover(self) -> MovingNode:
        return MovingNode(self.index, self._reader.plan, self._reader.nodes)

    def _settle(self, store: JobStore, seconds: float, log: EventLog) -> list[Event]:
        home = self._home
        self.shared.move_to(store)
        self._lost, self._rung = None, -1
        self._beats.keep(())
        self._reader.move(self.shared, home.opening)
        log.write("store-moved", endpoint=home.endpoint, epoch=home.place.epoch, host=home.place.host, seconds=seconds)
        self.shared.notify_change()
        silent = home.silent.keys() & self._reader.nodes.keys()
        reason = "its agent did not answer when the store was lost"
        return [StoreMoved(), *(NodeDead(index, reason, is_certain=False) for index in silent)]

    def _follow(self, place: Place, endpoint: str, log: EventLog) -> list[Event]:
        """The job went on elsewhere without this node: come back to it, or join it there."""
        if self._reader.plan is None:
            log.write("store-moved", endpoint=endpoint, epoch=place.epoch, host=place.host, seconds=0.0)
            raise MovedBeforeError(endpoint)
        with contextlib.suppress(RuntimeError, OSError, PeerError):
            return self._settle(self._home.follow(self._mover(), place, endpoint), 0.0, log)
        return []
