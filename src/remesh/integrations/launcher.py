"""``torch.distributed.launcher.api`` over our rendezvous: for programs that call torch's launcher as a function.

    from remesh.integrations.launcher import LaunchConfig, elastic_launch     # was torch.distributed.launcher.api

    values = elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, ...), train)(arguments)

What comes back, what is raised and what workers see are torch's, and so is the agent, as in ``remesh run --mode
restart``: a failure that ends the job is known on all nodes at once, with its cause, and every attempt meets in a store
of its own.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from remesh.elasticity.launch.flags import Mode
from remesh.elasticity.launch.restart import RestartJob, run_restart_job
from remesh.elasticity.store.admission import read_token
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.telemetry.events import EventLog
from remesh.foundation.errors import ConfigError, PeerError

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_log = logging.getLogger(__name__)


class elastic_launch:
    """A launcher of an entrypoint: a function, or a command; called with its arguments, it runs the job to its end."""

    def __init__(
        self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """What each worker of this node returned, by its global rank."""
        return launch_agent(self._config, self._entrypoint, list(args), self._server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: Sequence[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run this node's workers to their end; returns what each worker returned, by global rank.

    Called by the main thread, for signals end a job in order. Raises torch's ``ChildFailedError`` when a worker of this
    node failed for good, `PeerError` when one of another node did.
    """
    if entrypoint is None:
        raise ConfigError("launching: no entrypoint is given, expected a function or a command")
    config.run_id = config.run_id or uuid.uuid4().hex
    name = entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__qualname__", type(entrypoint).__name__)
    node_name = socket.gethostname()
    card = JobCard(Mode.RESTART.value, config.min_nodes, config.max_nodes, Path(name).name)
    token = read_token(config.run_id)
    job = RestartJob(config, entrypoint, tuple(args), card, token, node_name, health_check_server)
    log = EventLog(None, f"agent-{node_name}")
    try:
        end = run_restart_job(job, log, _log.warning)
    finally:
        log.close()
    if end.error is not None:
        raise end.error
    if not end.outcome.is_ok:
        raise PeerError(f"running {name} on {node_name}: {end.outcome.text}")
    return end.values
