"""Configuration of an agent, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std

from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.store.home import Address
from remesh.foundation.settings import timeout_s
from remesh.wire.tls import Tls
from remesh.wire.token import Token

MAX_CONNECT_TIMEOUT_S = timeout_s(60.0)
"""How long the store may take to answer, as torchrun's default; a shorter join timeout shortens it."""

DEFAULT_THREADS = "1"
"""``OMP_NUM_THREADS`` of workers where the environment does not set it."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What ``remesh run`` was asked for."""

    command: tuple[str, ...]
    """Program and arguments of a worker."""
    rules: AgentRules
    run_id: str
    endpoint: str
    """``host:port`` of the store; more of them, with commas, name where a newcomer may ask besides."""
    hosts_store: bool | None
    """Whether this agent hosts the store; None: if the endpoint names this machine, as torchrun does."""
    node_name: str
    local_address: str
    log_folder: Path | None
    redirects: Std
    tee: Std
    events_folder: Path | None
    card: JobCard
    """What all nodes of the job have in common."""
    token: Token
    tls: Tls | None = None
    """How state between nodes is encrypted; None: not at all."""

    @property
    def store_address(self) -> Address:
        """How its store is found."""
        return Address(
            run_id=self.run_id,
            endpoints=tuple(self.endpoint.split(",")),
            hosts_store=self.hosts_store,
            local_address=self.local_address,
            card=self.card,
            token=self.token,
            connect_timeout_s=min(self.rules.meeting.join_timeout_s, MAX_CONNECT_TIMEOUT_S),
            tls=self.tls,
        )
