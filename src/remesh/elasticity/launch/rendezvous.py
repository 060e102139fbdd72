"""Rendezvous of a restart-mode job's agents: torch's, on c10d, etcd, or fixed ranks, with admission by token.

Admission: an agent first compares the job's card (:mod:`remesh.elasticity.store.admission`), signed with the job's
token. The rendezvous state itself is signed too, and checked before torch unpickles it, so that a stranger that reaches
the store cannot make an agent run code. Fixed ranks (static) and backends of other packages have no such check.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    registry as handlers,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token as StateToken,
    create_handler,
)

from remesh.elasticity.launch.etcd import connect_etcd
from remesh.elasticity.store.admission import show_card
from remesh.elasticity.store.card import JobCard
from remesh.wire.token import Token

_STATE = "rendezvous"
_ATTEMPT = "remesh/attempt"
"""Port of the attempt's store."""


class SignedBackend(RendezvousBackend):
    """A rendezvous backend whose state only holders of the token can write."""

    def __init__(self, inner: RendezvousBackend, token: Token) -> None:
        self._inner = inner
        self._token = token

    @property
    def name(self) -> str:
        return str(self._inner.name)

    def get_state(self) -> tuple[bytes, StateToken] | None:
        found = self._inner.get_state()
        return None if found is None else (self._open(found[0]), found[1])

    def set_state(self, state: bytes, token: StateToken | None = None) -> tuple[bytes, StateToken, bool] | None:
        found = self._inner.set_state(self._token.seal(_STATE, state), token)
        return None if found is None else (self._open(found[0]), found[1], found[2])

    def _open(self, signed: bytes) -> bytes:
        state = self._token.unseal(_STATE, signed)
        if state is None:
            raise RendezvousStateError(
                f"reading the rendezvous of job {self._token.run_id!r}: its {len(signed)} bytes were not signed with "
                "this job's token; another job or program writes to this store"
            )
        return state


class ForwardingRendezvous(RendezvousHandler):
    """A rendezvous handler that asks another one; subclasses change what they must."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        return self._inner.next_rendezvous()

    def get_backend(self) -> str:
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())


class StoreForEachAttempt(ForwardingRendezvous):
    """A handler after whose every meeting workers find an empty store.

    ``names_rounds``: each meeting of the handler has keys of its own. Where it has none (fixed ranks) the
    nodes count their attempts, and the first one keeps the store at the port that the user gave, as under torchrun.
    """

    def __init__(self, inner: RendezvousHandler, *, names_rounds: bool) -> None:
        super().__init__(inner)
        self._names_rounds = names_rounds
        self._num_attempts = 0
        self._store: dist.Store | None = None
        """Of the last attempt, where this is node 0: it lives as long as this does."""

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        self._num_attempts += 1
        if self._num_attempts == 1 and not self._names_rounds:
            return info
        key = _ATTEMPT if self._names_rounds else f"{_ATTEMPT}/{self._num_attempts}"
        if info.rank == 0:
            hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store = hosted
            info.store.set(key, str(hosted.port))
        port = int(info.store.get(key))
        assert info.bootstrap_store_info is not None
        where = RendezvousStoreInfo(info.bootstrap_store_info.master_addr, port)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)


def open_meeting(parameters: RendezvousParameters, token: Token, card: JobCard) -> RendezvousHandler:
    """Connect to the meeting place and show the card.

    ConfigError when another job is there, RendezvousError when no store answers.
    """
    backend: Any
    store: dist.Store
    if parameters.backend == "c10d":
        backend, store = create_backend(parameters)
    elif parameters.backend in ("etcd", "etcd-v2"):
        backend, store = connect_etcd(parameters)
    else:
        return StoreForEachAttempt(handlers.get_rendezvous_handler(parameters), names_rounds=False)
    bound = show_card(store, token, card)
    handler = create_handler(store, SignedBackend(backend, bound), parameters)
    return StoreForEachAttempt(handler, names_rounds=True)
