"""Store whose keys survive the loss of its host, for torch's own agent, which only asks a store.

An agent of Remesh moves with its store by itself (`remesh.elasticity.node`). Any other one asks through `MovableHome`:
a request to a store that is lost goes to the next one, on which the nodes of the last round agree. `MovableStore` is a
store of torch's over it.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from remesh.elasticity.model.generation import Generation, NodeInfo
from remesh.elasticity.model.rank_assignment import MeshMember
from remesh.elasticity.store.home import Address, MovingNode, StoreHome
from remesh.elasticity.store.shared import JobStore
from remesh.elasticity.store.store_servers import StoreWatch
from remesh.foundation.errors import PeerError

_POLL_S = 0.02
_LOST = (dist.DistError, RuntimeError, OSError)
"""What requests raise when their store is gone."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class MovableHome:
    """The store in force, for all threads of this agent; requests to one that is lost go to the next.

    Raises torch's ``RendezvousConnectionError`` when no store answers, ConfigError if the store is another job's.
    """

    def __init__(self, address: Address) -> None:
        self._stack = contextlib.ExitStack()
        self._home = self._stack.enter_context(StoreHome(address, self._stack.enter_context(StoreWatch())))
        self._lock = threading.RLock()
        try:
            self._store = self._home.connect()
        except PeerError as error:
            self._stack.close()
            raise RendezvousConnectionError(str(error)) from error
        self.node = NodeInfo(
            index=self._home.next_index(self._store),
            name=socket.gethostname(),
            address=address.local_address,
            port=self._home.port,
            num_slots=1,
            store_port=self._home.port,
        )
        self._latest: Generation | None = None
        self._nodes: dict[int, NodeInfo] = {self.node.index: self.node}
        self.num_moves = 0
        """How often another store came into force."""

    def request(self, ask: Callable[[JobStore], T]) -> T:
        """The answer of the store in force."""
        while True:
            with self._lock:
                store, before = self._store, self.num_moves
                try:
                    return ask(store)
                except _LOST as error:
                    if self.num_moves == before:
                        self._move(error)

    def settle(self, nodes: Sequence[NodeInfo]) -> None:
        """Note the nodes of the round that begins, in the order of their ranks."""
        with self._lock:
            members = tuple(MeshMember(rank, node.index, 0, 0) for rank, node in enumerate(nodes))
            number = 1 if self._latest is None else self._latest.number + 1
            hosts = {node.index: node.name for node in nodes}
            axes = {"node": len(members)}
            self._latest = Generation(
                number, axes, members, (), hosts, step=0, taken=True, reason="a rendezvous", place=self._home.place
            )
            self._nodes |= {node.index: node for node in nodes}

    def follow(self) -> None:
        """Go to the store in force if the job moved to another one while this node did not answer."""
        with self._lock:
            moved = self.request(self._home.read_moved)
            if moved is not None and self._latest is not None:
                with contextlib.suppress(PeerError, *_LOST):
                    self._store = self._home.follow(self._mover(), *moved)
                    self.num_moves += 1

    def close(self) -> None:
        """Stop serving a store and asking others."""
        self._stack.close()

    def _mover(self) -> MovingNode:
        return MovingNode(self.node.index, self._latest, self._nodes)

    def _move(self, error: BaseException) -> None:
        endpoint, reason = self._home.endpoint, str(error).partition("\n")[0]
        found = self._home.move(self._mover())
        if found is None:
            why = "no round had begun" if self._latest is None else "too few nodes are here to go on without it"
            raise RendezvousConnectionError(
                f"lost the store at {endpoint} ({reason}), and {why}; start the job again, it goes on from its last "
                "checkpoint"
            ) from error
        self._store = found
        self.num_moves += 1
        _log.warning("lost the store at %s (%s); the job goes on at %s", endpoint, reason, self._home.endpoint)


class MovableStore(dist.Store):
    """The keys of rounds, as torch's rendezvous and its agent use them, in the store in force; all values signed."""

    def __init__(self, home: MovableHome) -> None:
        super().__init__()
        self._home = home

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._home.request(lambda store: store.put(key, value_of(content)))

    def get(self, key: str) -> bytes:
        for _ in self._until_there([key], self._limit()):
            found = self._home.request(lambda store: store.get(key))
            if found is not None:
                return bytes_of(found)
        raise AssertionError("the wait for a key ends with it or with an error")

    def add(self, key: str, value: int) -> int:
        return self._home.request(lambda store: store.count(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._home.request(lambda store, key=key: store.get(key)) is not None for key in keys)  # type: ignore[misc]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for _ in self._until_there(keys, timeout or self._limit()):
            if self.check(keys):
                return

    def _limit(self) -> timedelta:
        found: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stubs leave it out
        return found

    def _until_there(self, keys: Sequence[str], timeout: timedelta) -> Iterator[None]:
        deadline_s = time.monotonic() + timeout.total_seconds()
        while True:
            yield
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"waiting for {', '.join(keys)}: not there after {timeout}")
            time.sleep(_POLL_S)


def value_of(content: bytes) -> dict[str, str]:
    """Bytes as a value of a `JobStore`."""
    return {"value": base64.b64encode(content).decode()}


def bytes_of(value: dict[str, str]) -> bytes:
    """The bytes of such a value."""
    return base64.b64decode(value["value"])
