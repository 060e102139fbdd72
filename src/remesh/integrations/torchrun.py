"""``torchrun --rdzv-backend remesh``: a rendezvous whose store survives the host that it was on.

torch's own rendezvous decides which nodes are in, and its agent does the rest; only the place of the state changes.
Every agent keeps a store of its own beside the one in force. When that one is lost, the agents of the last round agree
on another store by a majority of those that may be alive (`remesh.elastic.failover`), bring along the state as each
last saw it, and go on there. torch's agent does not notice; it restarts its workers without the lost node.

    torch's agent ── next_rendezvous ──> MovableRendezvous ── state ──> MovableState ─┐
                                             └── the round's keys ──> MovableStore ─┴─> the store in force (JobHome)

A program that starts jobs by torch's functions, as ``accelerate launch`` does, names the backend in `LaunchConfig`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from remesh.comm.token import MIN_SECRET_BYTES, Token
from remesh.elastic.generation import Generation, NodeInfo
from remesh.elastic.launch.meeting import StoreForEachAttempt
from remesh.elastic.seats import MeshMember
from remesh.elastic.store.card import JobCard
from remesh.elastic.store.endpoint import is_loopback, split_endpoint
from remesh.elastic.store.home import Address, MovingNode, StoreHome
from remesh.elastic.store.server import StoreWatch
from remesh.elastic.store.shared import JobStore
from remesh.errors import ConfigError, PeerError

BACKEND = "remesh"
DEFAULT_PORT = 29400
CONNECT_TIMEOUT_S = 60
_KNOWN = frozenset(
    {
        *("is_host", "read_timeout", "timeout", "join_timeout", "last_call_timeout", "close_timeout"),
        *("heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    }
)
"""Keys of --rdzv-conf: those of torch's c10d backend that mean something here."""
_STATE = "rendezvous"
_POLL_S = 0.02
_LOST = (dist.DistError, RuntimeError, OSError)
"""What requests raise when their store is gone."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def create_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """This node's handler, connected to the store in force. Raises ConfigError if that is another job's store.

    ``parameters.endpoint`` names one place or several, with commas: the first is where the store begins, and a node
    that comes later asks all of them.
    """
    if strange := sorted(parameters.config.keys() - _KNOWN):
        raise ConfigError(
            f"reading --rdzv-conf: rendezvous remesh knows {sorted(_KNOWN)}, found {strange}; correct them"
        )
    # Workers of a round meet in a store of that round, so torch's own, which outlives its address, is not shared.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    home = JobHome(_address_of(parameters))
    handler = create_handler(MovableStore(home), MovableState(home), parameters)
    return MovableRendezvous(handler, home)


class JobHome:
    """The store in force, for all threads of this agent; requests to one that is lost go to the next."""

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

    def request(self, ask: Callable[[JobStore], T]) -> T:
        """The answer of the store in force; raises RendezvousConnectionError if no store answers."""
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


class MovableState(RendezvousBackend):
    """The state of torch's rendezvous: one signed value, brought along to another store as it was last seen."""

    def __init__(self, home: JobHome) -> None:
        self._home = home
        self._seen: dict[str, Any] | None = None
        self._num_moves = 0

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        self._home.follow()
        self._take(self._home.request(lambda store: store.get(_STATE)))
        if self._num_moves != self._home.num_moves:
            return self._bring()
        return None if self._seen is None else (_bytes_of(self._seen), self._seen)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if self._num_moves != self._home.num_moves and (brought := self.get_state()) is not None:
            return *brought, False
        number = 1 if token is None else token["number"] + 1
        value = {"number": number, "by": self._home.node.index, **_value_of(state)}
        found = self._home.request(lambda store: store.swap(_STATE, token, value))
        if self._num_moves != self._home.num_moves:
            brought = self.get_state()
            return None if brought is None else (*brought, False)
        self._take(found)
        return None if self._seen is None else (_bytes_of(self._seen), self._seen, found == value)

    def _bring(self) -> tuple[bytes, Any] | None:
        """The state in a store that is new to this node: what another node brought, or what this node saw last."""
        seen, self._num_moves = self._seen, self._home.num_moves
        if seen is not None:
            self._home.request(lambda store: store.put_once(_STATE, seen))
        return self.get_state()

    def _take(self, found: dict[str, Any] | None) -> None:
        self._seen = found if found is not None else self._seen


class MovableStore(dist.Store):
    """The keys of rounds, as torch's rendezvous and its agent use them, in the store in force; all values signed."""

    def __init__(self, home: JobHome) -> None:
        super().__init__()
        self._home = home

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._home.request(lambda store: store.put(key, _value_of(content)))

    def get(self, key: str) -> bytes:
        for _ in self._until_there([key], self._limit()):
            found = self._home.request(lambda store: store.get(key))
            if found is not None:
                return _bytes_of(found)
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


class MovableRendezvous(StoreForEachAttempt):
    """torch's rendezvous over a store that moves. After each meeting all nodes know each other's stores."""

    def __init__(self, inner: RendezvousHandler, home: JobHome) -> None:
        super().__init__(inner, names_rounds=True)
        self._home = home

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        info.store.set(f"remesh/node/{info.rank}", json.dumps(asdict(self._home.node)))
        told = [json.loads(info.store.get(f"remesh/node/{rank}")) for rank in range(info.world_size)]
        self._home.settle([NodeInfo(**one) for one in told])
        return info

    def shutdown(self) -> bool:
        try:
            return super().shutdown()
        finally:
            self._home.close()


def _value_of(content: bytes) -> dict[str, str]:
    return {"value": base64.b64encode(content).decode()}


def _bytes_of(value: dict[str, Any]) -> bytes:
    return base64.b64decode(value["value"])


def _address_of(parameters: RendezvousParameters) -> Address:
    places = [one.strip() for one in parameters.endpoint.split(",") if one.strip()]
    if not places:
        raise ConfigError(
            "joining the other nodes: rendezvous remesh needs --rdzv-endpoint HOST[:PORT][,HOST[:PORT]...]"
        )
    endpoints = tuple(one if ":" in one else f"{one}:{DEFAULT_PORT}" for one in places)
    secret = os.environ.get("REMESH_TOKEN", "").encode()
    if secret and len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"reading REMESH_TOKEN: found {len(secret)} bytes, expected {MIN_SECRET_BYTES} or more")
    return Address(
        run_id=parameters.run_id,
        endpoints=endpoints,
        hosts_store=parameters.get_as_bool("is_host"),
        local_address=parameters.local_addr or _address_towards(*split_endpoint(endpoints[0])),
        card=JobCard("torchrun", parameters.min_nodes, parameters.max_nodes, ""),
        token=Token(parameters.run_id, secret),
        connect_timeout_s=float(parameters.get_as_int("read_timeout", CONNECT_TIMEOUT_S) or CONNECT_TIMEOUT_S),
    )


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host; sends nothing."""
    if is_loopback(host):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
