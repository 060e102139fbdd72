"""``torchrun --rdzv-backend remesh``: a rendezvous whose store survives the host that it was on.

torch's own rendezvous decides which nodes are in, and its agent does the rest; only the place of the state changes.
Every agent keeps a store of its own beside the one in force. When that one is lost, the agents of the last round agree
on another store by a majority of those that may be alive (`remesh.elasticity.model.failover`), bring along the state as
each last saw it, and go on there. torch's agent does not notice; it restarts its workers without the lost node.

    torch's agent ── next_rendezvous ──> MovableRendezvous ── state ──> MovableState ─┐
                                             └── the round's keys ──> MovableStore ─┴─> the store in force (MovableHome)

A program that starts jobs by torch's functions, as ``accelerate launch`` does, names the backend in `LaunchConfig`.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from remesh.elasticity.launch.flag_checks import split_endpoints, with_port
from remesh.elasticity.launch.rendezvous import StoreForEachAttempt
from remesh.elasticity.model.generation import NodeInfo
from remesh.elasticity.store.admission import read_token
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.store.endpoint import is_loopback, split_endpoint
from remesh.elasticity.store.home import Address
from remesh.elasticity.store.movable import MovableHome, MovableStore, bytes_of, value_of
from remesh.foundation.errors import ConfigError

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
    home = MovableHome(_address_of(parameters))
    handler = create_handler(MovableStore(home), MovableState(home), parameters)
    return MovableRendezvous(handler, home)


class MovableState(RendezvousBackend):
    """The state of torch's rendezvous: one signed value, brought along to another store as it was last seen."""

    def __init__(self, home: MovableHome) -> None:
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
        return None if self._seen is None else (bytes_of(self._seen), self._seen)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if self._num_moves != self._home.num_moves and (brought := self.get_state()) is not None:
            return *brought, False
        number = 1 if token is None else token["number"] + 1
        value = {"number": number, "by": self._home.node.index, **value_of(state)}
        found = self._home.request(lambda store: store.swap(_STATE, token, value))
        if self._num_moves != self._home.num_moves:
            brought = self.get_state()
            return None if brought is None else (*brought, False)
        self._take(found)
        return None if self._seen is None else (bytes_of(self._seen), self._seen, found == value)

    def _bring(self) -> tuple[bytes, Any] | None:
        """The state in a store that is new to this node: what another node brought, or what this node saw last."""
        seen, self._num_moves = self._seen, self._home.num_moves
        if seen is not None:
            self._home.request(lambda store: store.put_once(_STATE, seen))
        return self.get_state()

    def _take(self, found: dict[str, Any] | None) -> None:
        self._seen = found if found is not None else self._seen


class MovableRendezvous(StoreForEachAttempt):
    """torch's rendezvous over a store that moves. After each meeting all nodes know each other's stores."""

    def __init__(self, inner: RendezvousHandler, home: MovableHome) -> None:
        super().__init__(inner, names_rounds=True)
        self._home = home

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        info.store.set(f"remesh/node/{info.rank}", json.dumps(asdict(self._home.node)))
        nodes = [json.loads(info.store.get(f"remesh/node/{rank}")) for rank in range(info.world_size)]
        self._home.settle([NodeInfo(**one) for one in nodes])
        return info

    def shutdown(self) -> bool:
        try:
            return super().shutdown()
        finally:
            self._home.close()


def _address_of(parameters: RendezvousParameters) -> Address:
    places = split_endpoints(parameters.endpoint)
    if not places:
        raise ConfigError(
            "joining the other nodes: rendezvous remesh needs --rdzv-endpoint HOST[:PORT][,HOST[:PORT]...]"
        )
    endpoints = tuple(with_port(one, DEFAULT_PORT) for one in places)
    return Address(
        run_id=parameters.run_id,
        endpoints=endpoints,
        hosts_store=parameters.get_as_bool("is_host"),
        local_address=parameters.local_addr or _address_towards(*split_endpoint(endpoints[0])),
        card=JobCard("torchrun", parameters.min_nodes, parameters.max_nodes, ""),
        token=read_token(parameters.run_id),
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
