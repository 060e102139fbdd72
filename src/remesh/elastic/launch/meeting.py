"""Where the agents of a restart-mode job meet: torch's rendezvous on c10d, etcd, or fixed ranks, behind a door.

The door: an agent first compares the job's card (:mod:`remesh.elastic.store.door`), signed with the job's token.
The rendezvous state itself is signed too, and checked before torch unpickles it, so that a stranger who reaches the
store cannot make an agent run code. Fixed ranks (static) and backends of other packages have no such door.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous import registry as handlers
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token as StateToken

from remesh.comm.token import Token
from remesh.elastic.launch.etcd import connect_etcd
from remesh.elastic.store.card import JobCard
from remesh.elastic.store.door import show_card

_STATE = "rendezvous"


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
                "this job's token; somebody else writes to this store"
            )
        return state


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """A rendezvous handler, and the store beneath it."""

    handler: RendezvousHandler
    store: dist.Store | None
    """None where a handler keeps its store to itself until the first meeting (static)."""


def open_meeting(parameters: RendezvousParameters, token: Token, card: JobCard) -> MeetingPlace:
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
        return MeetingPlace(handlers.get_rendezvous_handler(parameters), None)
    bound = show_card(store, token, card)
    return MeetingPlace(create_handler(store, SignedBackend(backend, bound), parameters), store)
