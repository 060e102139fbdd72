"""Where the agents of a restart-mode job meet: torch's rendezvous on c10d, etcd, or fixed ranks, behind a door.

The door: an agent first compares the job's card (:mod:`remesh.elastic.launch.job_card`), signed with the job's token.
The rendezvous state itself is signed too, and checked before torch unpickles it, so that a stranger who reaches the
store cannot make an agent run code. Fixed ranks (static) and backends of other packages have no such door.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous import registry as handlers
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token as StateToken

from remesh.elastic.launch.etcd import connect_etcd
from remesh.elastic.launch.job_card import JobCard, describe_difference
from remesh.elastic.token import MAC_BYTES, Token
from remesh.errors import ConfigError

_STATE = "rendezvous"
CARD_KEY = "card"
MAX_CARD_BYTES = 64 << 10


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
        found = self._inner.set_state(self._token.sign(_STATE, state) + state, token)
        return None if found is None else (self._open(found[0]), found[1], found[2])

    def _open(self, signed: bytes) -> bytes:
        mac, state = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if not self._token.fits(_STATE, state, mac):
            raise RendezvousStateError(
                f"reading the rendezvous of job {self._token.run_id!r}: its {len(signed)} bytes were not signed with "
                "this job's token; somebody else writes to this store"
            )
        return state


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rendezvous handler, and the store beneath it."""

    handler: RendezvousHandler
    store: dist.Store | None
    """None where a handler keeps its store to itself until the first meeting (static)."""


def open_meeting(parameters: RendezvousParameters, token: Token, card: JobCard) -> Meeting:
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
        return Meeting(handlers.get_rendezvous_handler(parameters), None)
    bound = show_card(store, token, card)
    return Meeting(create_handler(store, SignedBackend(backend, bound), parameters), store)


def show_card(store: dist.Store, token: Token, card: JobCard) -> Token:
    """Leave this job's card in the store, or compare it with the one that is there; ConfigError when they differ.

    The token that comes back answers the challenge on the card: all that follows is signed with it.
    """
    key = f"remesh/{token.run_id}/{CARD_KEY}"
    text = json.dumps({"card": card.to_json(), "challenge": secrets.token_hex(16)})
    signed = token.sign(CARD_KEY, text.encode()).hex() + text
    found = bytes(store.compare_set(key, "", signed))
    mac, data = found[: 2 * MAC_BYTES], found[2 * MAC_BYTES :]
    try:
        is_ours = len(found) <= MAX_CARD_BYTES and token.fits(CARD_KEY, data, bytes.fromhex(mac.decode()))
    except ValueError:
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"joining job {token.run_id!r}: the token does not fit the one that its first node was started with; give "
            "all nodes the same --token-file (or REMESH_TOKEN), or another --rdzv-id if these are two jobs"
        )
    told = json.loads(data)
    difference = describe_difference(token.run_id, card, told["card"])
    if difference is not None:
        raise ConfigError(difference)
    return token.bound_to(str(told["challenge"]))
