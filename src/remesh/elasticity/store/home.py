"""Store client of an agent across failover: finds the active store, leaves a lost one, informs the others.

The shell around :mod:`remesh.elasticity.model.failover`. Keys of a store, besides the job's own:

    card               the job's card, brought along by the first node that moves
    standby/movers/<i> node i would move here
    standby/open       which place this is, the newest generation then, and the nodes known then; set once
    moved              the job goes on elsewhere; written by the host of the later place
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from remesh.elasticity.model.failover import (
    FIRST_OPENING,
    REFUSED,
    SILENT,
    Answer,
    Base,
    Join,
    Open,
    Opening,
    Place,
    Register,
    Return,
    Standby,
    decide_move,
)
from remesh.elasticity.model.generation import Generation, NodeInfo
from remesh.elasticity.store.admission import CARD_KEY, show_card
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.store.endpoint import join_endpoint, split_endpoint
from remesh.elasticity.store.shared import JobStore
from remesh.elasticity.store.store_servers import (
    STORE_SILENCE_TIMEOUT_S,
    StoreClient,
    StoreServer,
    StoreWatch,
    bind_endpoint,
    names_this_machine,
)
from remesh.elasticity.store.tunnel import Refusal, Tunnels
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.settings import timeout_s
from remesh.foundation.threads import make_thread
from remesh.wire.listening import PROBE_TIMEOUT_S, is_listening, listen_at
from remesh.wire.tls import Tls
from remesh.wire.token import Token

ASK_TIMEOUT_S = timeout_s(1.0)
"""How long another store may take to take a connection; the old one longer each time, up to STORE_SILENCE_TIMEOUT_S."""
ROUND_POLL_S = 0.02
SILENT_POLL_S = 3.0
MOVE_TIMEOUT_S = timeout_s(30.0)
"""How long an agent without a store looks for another one."""
KNOCK_INTERVAL_S = 1.0
MAX_KNOCK_INTERVAL_S = 30.0
_OPEN, _MOVERS, _MOVED = "standby/open", "standby/movers/", "moved"


@dataclass(frozen=True, slots=True)
class Address:
    """How the job is found, and what is shown for admission."""

    run_id: str
    endpoints: tuple[str, ...]
    """``host:port`` each. The first names the store that is in force at the start; all are asked by a newcomer."""
    hosts_store: bool | None
    """Whether this agent hosts the first store; None: if an endpoint names this machine, as torchrun does."""
    local_address: str
    card: JobCard
    token: Token
    connect_timeout_s: float
    tls: Tls | None = None
    """How the store is reached from other nodes, and by them; None: in the clear."""


@dataclass(frozen=True, slots=True)
class MovingNode:
    """The knowledge of an agent about its job when it changes the store."""

    index: int
    latest: Generation | None
    nodes: Mapping[int, NodeInfo]


@dataclass
class StoreHome:
    """One agent's store in force, and its own store. A context manager: entered, its own store listens."""

    address: Address
    watch: StoreWatch
    opening: Opening = FIRST_OPENING
    """The opening that the store in force holds."""
    endpoint: str = ""
    """Of the store in force."""
    _token: Token | None = None
    _card_text: str = ""
    """The job's card as its first node signed it."""
    silent: dict[int, float] = field(default_factory=dict)
    """Nodes that did not answer when they were last asked, as the store was looked for, and when."""
    _num_silences: dict[tuple[str, int], int] = field(default_factory=dict)
    """By address and port, how often in a row nothing answered: a slow or distant host is given longer each time."""
    _clients: dict[int, StoreClient] = field(default_factory=dict)
    """Agents' own stores, by node."""
    _tunnels: Tunnels | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _knocker: threading.Thread | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> StoreHome:
        listener = self._bind()
        self._port: int = listener.getsockname()[1]
        tls = self.address.tls
        if tls is not None:
            self._tunnels = self._stack.enter_context(Tunnels(tls))
        self._server = StoreServer(listener if tls is None else socket.create_server(("127.0.0.1", 0)))
        if self._tunnels is not None:
            self._tunnels.open_port(listener, self._server.port)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_knocking()
        self._stack.close()

    @property
    def place(self) -> Place:
        """The store in force."""
        return self.opening.place

    @property
    def port(self) -> int:
        """The port of this agent's own store."""
        return self._port

    @property
    def way(self) -> str:
        """The address at which processes of this node reach the current store."""
        return self._way_to(self.endpoint)

    def take_refusals(self) -> list[Refusal]:
        """Connections that were refused for their certificates since the last call."""
        return [] if self._tunnels is None else self._tunnels.take_notes()

    def _way_to(self, endpoint: str) -> str:
        return endpoint if self._tunnels is None else self._tunnels.way_to(endpoint)

    # --- the first time ---

    def connect(self) -> JobStore:
        """The store in force: of the latest place that any endpoint knows, else the first one.

        ConfigError when another job is there, PeerError when no store answers in time.
        """
        deadline_s = time.monotonic() + self.address.connect_timeout_s
        error: object = "connection refused"
        while time.monotonic() < deadline_s:
            try:
                found = self._scan()
            except (RuntimeError, OSError) as failed:
                found, error = None, failed
            if found is not None:
                return found
            time.sleep(ROUND_POLL_S)
        endpoints = ", ".join(self.address.endpoints)
        if refusals := self.take_refusals():
            raise PeerError(
                f"joining the other nodes of job {self.address.run_id!r}: {refusals[-1].doing}: {refusals[-1].reason}; "
                "give all nodes certificates of one authority that are still valid (--tls-cert, --tls-key, --tls-ca)"
            )
        raise PeerError(
            f"joining the other nodes of job {self.address.run_id!r}: no store answers at {endpoints} "
            f"({str(error).splitlines()[0]}); start the node that hosts it, or correct --rdzv-endpoint"
        )

    def next_index(self, store: JobStore) -> int:
        """A number for a node that registers now."""
        return self.opening.first_index + store.count("nodes/count", by=1) - 1

    def _bind(self) -> socket.socket:
        """Bind the first endpoint that names this machine and is free, else a port beside the agent's other ports."""
        address = self.address
        for number, endpoint in enumerate(address.endpoints):
            must_host = address.hosts_store is True and number == 0
            host, port = split_endpoint(endpoint)
            if address.hosts_store is False or not (must_host or names_this_machine(host)):
                continue
            try:
                return bind_endpoint(host, port)
            except OSError as error:
                if must_host:
                    raise ConfigError(
                        f"hosting the store: port {port} is taken, perhaps by another job ({error}); give another port"
                    ) from error
        return listen_at(address.local_address)

    def _scan(self) -> JobStore | None:
        """The store to join if it can be decided now."""
        first: StoreClient | None = None
        best: tuple[Place, StoreClient] | None = None
        for number, endpoint in enumerate(self.address.endpoints):
            if not self._probe(*split_endpoint(endpoint)):
                continue
            client = self._connect(endpoint, self.address.connect_timeout_s, STORE_SILENCE_TIMEOUT_S)
            first = client if number == 0 else first
            if client.store.check([f"remesh/{self.address.run_id}/{CARD_KEY}"]):
                token = show_card(client.store, self.address.token, self.address.card)
                opened = _read_open(self._face(client, token))
                if opened is not None and (best is None or opened.place > best[0]):
                    best = opened.place, client
        found = best[1] if best is not None else first
        if found is None:
            return None
        self._token = show_card(found.store, self.address.token, self.address.card)
        self._card_text = found.store.get(f"remesh/{self.address.run_id}/{CARD_KEY}").decode()
        store = self._face(found, self._token)
        # A store that a job moved to is known by its place; any other is the first.
        store.put_once(_OPEN, FIRST_OPENING.to_json())
        return self._enter(found)

    def _enter(self, client: StoreClient) -> JobStore:
        assert self._token is not None
        store = self._face(client, self._token)
        opened = _read_open(store)
        if opened is None:
            raise PeerError(
                f"entering the store at {client.endpoint}: the process that opened it does not have the job's token"
            )
        self.opening = opened
        self.endpoint = client.endpoint
        return store

    # --- when it is lost ---

    def move(self, me: MovingNode) -> JobStore | None:
        """Another store in force, or the old one if it answers again; None when there is none to be had in time."""
        self.silent.clear()
        deadline_s = time.monotonic() + MOVE_TIMEOUT_S
        if me.latest is None:
            return self._wait_for_old(deadline_s)
        bases = [Base(tuple(me.latest.nodes), me.latest.place)]
        while time.monotonic() < deadline_s:
            with contextlib.suppress(RuntimeError, OSError):
                if (found := self._move_once(me, bases)) is not None:
                    return found
            time.sleep(ROUND_POLL_S)
        return None

    def follow(self, me: MovingNode, place: Place, endpoint: str) -> JobStore:
        """Connect to the store that the job moved to. RuntimeError or OSError when nothing answers there."""
        client = self._connect(endpoint, ASK_TIMEOUT_S, STORE_SILENCE_TIMEOUT_S)
        self._bring(client, me)
        store = self._enter(client)
        if self.place < place:
            raise PeerError(
                f"moving to the new store of the job at {endpoint}: expected {place} there, found {self.place}"
            )
        self._tell_stragglers(me)
        return store

    def _move_once(self, me: MovingNode, bases: list[Base]) -> JobStore | None:
        assert me.latest is not None
        old = self._try_old()
        answers = {node: self._ask(node, me) for node in sorted({*me.latest.nodes, me.index})}
        match decide_move(me.index, self.place, bases, old_answers=old is not None, answers=answers):
            case Return():
                assert old is not None
                return self._enter(old)
            case Join(place):
                info = me.nodes[place.host]
                host = self.address.local_address if place.host == me.index else info.address
                return self.follow(me, place, join_endpoint(host, info.store_port))
            case Register(host):
                self._bring(self._client_of(host, me), me)
                self._store_of(host, me).put_once(f"{_MOVERS}{me.index}", {})
            case Open(place):
                opening = Opening.at(place, me.latest.number, me.nodes.keys())
                self._store_of(place.host, me).put_once(_OPEN, opening.to_json())
        return None

    def _wait_for_old(self, deadline_s: float) -> JobStore | None:
        """The old store once it answers again, which is all that a node may go to that was in no generation yet.

        None when its port refuses connections, or it does not answer in time.
        """
        while time.monotonic() < deadline_s:
            with contextlib.suppress(RuntimeError, OSError):
                if (old := self._try_old()) is not None:
                    return self._enter(old)
                if self._probe(*split_endpoint(self.endpoint)) is False:
                    return None
            time.sleep(ROUND_POLL_S)
        return None

    def _try_old(self) -> StoreClient | None:
        where = split_endpoint(self.endpoint)
        if self._fell_silent(-1) or not self._probe(*where):
            return None
        assert self._token is not None
        patience_s = min(ASK_TIMEOUT_S * 2 ** self._num_silences.get(where, 0), STORE_SILENCE_TIMEOUT_S)
        try:
            client = self._connect(self.endpoint, patience_s, STORE_SILENCE_TIMEOUT_S)
            opened = _read_open(self._face(client, self._token))
        except (RuntimeError, OSError):
            self.silent[-1] = time.monotonic()
            self._num_silences[where] = self._num_silences.get(where, 0) + 1
            return None
        self._num_silences.pop(where, None)
        # A new store at the old address knows nothing of this job.
        return client if opened is not None and opened.place == self.place else None

    def _ask(self, node: int, me: MovingNode) -> Answer:
        info = me.nodes.get(node)
        if info is None or self._fell_silent(node):
            return SILENT
        if node != me.index and node not in self._clients:
            answers = self._probe(info.address, info.port)
            if not answers:
                if answers is None:
                    self.silent[node] = time.monotonic()
                return REFUSED if answers is False else SILENT
        try:
            store = self._store_of(node, me)
            opened = _read_open(store)
            assert me.latest is not None
            movers = frozenset(one for one in me.latest.nodes if store.get(f"{_MOVERS}{one}") is not None)
        except (RuntimeError, OSError):
            self._clients.pop(node, None)
            self.silent[node] = time.monotonic()
            return SILENT
        self.silent.pop(node, None)
        return Standby(None if opened is None else opened.place, movers)

    def _probe(self, address: str, port: int) -> bool | None:
        """Whether a port accepts a connection, as `is_listening` returns it."""
        num_silences = self._num_silences.get((address, port), 0)
        found = is_listening(address, port, min(PROBE_TIMEOUT_S * 2**num_silences, ASK_TIMEOUT_S))
        if found is None:
            self._num_silences[address, port] = num_silences + 1
        return found

    def _fell_silent(self, node: int) -> bool:
        """Whether a node (-1: the old store) did not answer a moment ago; it is not asked again so soon."""
        return time.monotonic() - self.silent.get(node, -SILENT_POLL_S) < SILENT_POLL_S

    def _client_of(self, node: int, me: MovingNode) -> StoreClient:
        if node not in self._clients:
            info = me.nodes[node]
            # The store's own client tries a refused connection again and again.
            if not self._probe(info.address, info.store_port):
                raise ConnectionRefusedError(f"no store answers at {info.address}:{info.store_port}")
            self._clients[node] = self._connect(join_endpoint(info.address, info.store_port), ASK_TIMEOUT_S)
        return self._clients[node]

    def _store_of(self, node: int, me: MovingNode) -> JobStore:
        assert self._token is not None
        return self._face(self._client_of(node, me), self._token)

    def _bring(self, client: StoreClient, me: MovingNode) -> None:
        """Let a store know the job's card, its newest generation and its nodes."""
        assert self._token is not None
        with client.guard():
            client.store.compare_set(f"remesh/{self.address.run_id}/{CARD_KEY}", "", self._card_text)
        store = self._face(client, self._token)
        for index, info in me.nodes.items():
            store.put_once(f"nodes/{index}", asdict(info))
        if me.latest is not None:
            store.put_once(f"gen/{me.latest.number}/plan", me.latest.to_json())

    def _connect(self, endpoint: str, connect_s: float, limit_s: float = ASK_TIMEOUT_S) -> StoreClient:
        return StoreClient(endpoint, self.watch, connect_s=connect_s, limit_s=limit_s, way=self._way_to(endpoint))

    def _face(self, client: StoreClient, token: Token) -> JobStore:
        return JobStore(dist.PrefixStore(f"remesh/{self.address.run_id}", client.store), token, client.guard)

    # --- agents that stayed behind ---

    def read_moved(self, store: JobStore) -> tuple[Place, str] | None:
        """The place and endpoint of the store to which the job has moved, if it left this one."""
        moved_to = store.get(_MOVED)
        if moved_to is None:
            return None
        place = Place(**moved_to["place"])
        return (place, str(moved_to["endpoint"])) if place > self.place else None

    def _tell_stragglers(self, me: MovingNode) -> None:
        """Keep writing the endpoint to the stores of earlier places, if this agent hosts the current one."""
        self._stop_knocking()
        if self.place.host != me.index:
            return
        own = join_endpoint(self.address.local_address, self.port)
        others = {join_endpoint(info.address, info.store_port) for index, info in me.nodes.items() if index != me.index}
        targets = others.union(self.address.endpoints) - {own, self.endpoint}
        note = {"place": self.place.to_json(), "endpoint": own}
        self._knocker = make_thread("knock", self._knock, targets, note, daemon=True)
        self._knocker.start()

    def _stop_knocking(self) -> None:
        if self._knocker is not None:
            # A thread that is still inside the store's client when the interpreter ends would abort the process.
            self._ended.set()
            self._knocker.join()
            self._knocker = None
            self._ended.clear()

    def _knock(self, targets: set[str], note: Mapping[str, Any]) -> None:
        pauses_s = dict.fromkeys(sorted(targets), KNOCK_INTERVAL_S)
        due_s = dict.fromkeys(pauses_s, 0.0)
        while not self._ended.wait(KNOCK_INTERVAL_S):
            for endpoint, pause_s in pauses_s.items():
                if time.monotonic() < due_s[endpoint] or self._ended.is_set():
                    continue
                try:
                    if self._probe(*split_endpoint(endpoint)):
                        self._leave_note(endpoint, note)
                except (RuntimeError, OSError):
                    # It takes connections and does not answer: it hangs, and is left alone for longer.
                    pauses_s[endpoint] = min(2 * pause_s, MAX_KNOCK_INTERVAL_S)
                due_s[endpoint] = time.monotonic() + pauses_s[endpoint]

    def _leave_note(self, endpoint: str, note: Mapping[str, Any]) -> None:
        client = self._connect(endpoint, ASK_TIMEOUT_S)
        # A job that was begun anew under this name has a card of its own; the note must fit that one.
        key = f"remesh/{self.address.run_id}/{CARD_KEY}"
        if client.store.check([key]):
            with contextlib.suppress(ConfigError):
                token = show_card(client.store, self.address.token, self.address.card)
                self._face(client, token).put(_MOVED, note)


def _read_open(store: JobStore) -> Opening | None:
    record = store.get(_OPEN)
    return None if record is None else Opening.from_json(record)
