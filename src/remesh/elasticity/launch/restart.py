"""Restart mode: torch's own launcher over our rendezvous, with events, the cause of a failure, and an end for all.

``torch.distributed.launcher.api.launch_agent`` does all that it does under torchrun: rendezvous, ranks, environment,
logs, the monitor loop, restarts, the exit barrier, the error file. What is added comes in by two public ways:

- *the rendezvous handler*, which torch's agent asks for each attempt, and between attempts for nodes that wait. So each
  attempt has a store of its own (:mod:`remesh.elasticity.launch.rendezvous`), restarts are reported, and a failure that
  ended the job on one node is left in the store, where all other agents find it within a monitor interval, and end,
  too;
- *torch's events*, which name the workers that were started.

The cause that is reported is the earliest failure of any node that follows from no other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.events import Event
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from remesh.elasticity.launch.rendezvous import ForwardingRendezvous, open_meeting
from remesh.elasticity.model.outcome import (
    MOST_TRACED,
    Category,
    Outcome,
    WorkerFailure,
    decide_cause,
    describe_failure,
    shortened,
)
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.telemetry.events import EventLog
from remesh.wire.token import Token

_ENDED = "remesh/ended"
_FAILURES = "remesh/failures/"
_NUM_INFORMED = "remesh/heard"
_ORDER = "remesh/order"
FAREWELL_GRACE_S = 15.0
"""How long an agent whose workers failed for good waits until the others know, for it may host their store.

As long as torch's meeting waits for a sign of life: a node that is silent for longer counts as lost.
"""
_POLL_S = 0.02
_STORE_GONE = (dist.DistError, RuntimeError)
"""What calls of a store raise once its host is gone."""
_BACKEND = "remesh-restart"
"""The name under which torch's launcher finds the handler that is given to it."""
_HANDLER = "handler"


@dataclass(frozen=True, slots=True)
class RestartJob:
    """The job to run, as torch's launcher describes it, with its token and its card."""

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    arguments: tuple[str, ...]
    card: JobCard
    token: Token
    node_name: str
    health_check_server: Any = None
    """torch's, for its agent; None where there is none, or this torch has none."""


@dataclass(frozen=True, slots=True)
class RestartEnd:
    """How this node's part of a job ended."""

    outcome: Outcome
    values: dict[int, Any]
    """What each worker of this node returned, by global rank."""
    error: ChildFailedError | None = None
    """torch's own error, where workers of this node failed for good."""


class EndedElsewhereError(Exception):
    """Another node's workers failed for good: this node's are to end too."""

    def __init__(self, failures: Sequence[WorkerFailure]) -> None:
        """``failures``: those that are known; none if the store went with the other node."""
        super().__init__("another node's workers failed, and no restarts are left on that node")
        self.failures = failures


class _EndedBeforeError(Exception):
    """The job had ended while this node waited to be let in."""


class SharedEnd(ForwardingRendezvous):
    """A rendezvous through which the agents of a job learn of each other's end; it reports each restart.

    torch's launcher asks to shut it down before it is known here how the job ended: that is done by :meth:`close`.
    """

    def __init__(self, inner: RendezvousHandler, on_restart: Callable[[str, bool], None]) -> None:
        """``on_restart`` takes the reason of a restart, and whether it uses one up."""
        super().__init__(inner)
        self._on_restart = on_restart
        self._round: RendezvousInfo | None = None
        self._is_joined = False
        """Whether nodes waited when torch's agent last asked: it then restarts its workers for them."""
        self._closes = False

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._round is not None:
            reason = "another node wants to join, or has restarted" if self._is_joined else "workers failed"
            self._on_restart(reason, not self._is_joined)
        try:
            self._round = super().next_rendezvous()
        except RendezvousGracefulExitError as error:
            raise _EndedBeforeError from error
        except RendezvousClosedError:
            self._raise_if_ended()
            raise
        return self._round

    def num_nodes_waiting(self) -> int:
        self._raise_if_ended()
        num_waiting = super().num_nodes_waiting()
        self._is_joined = num_waiting > 0
        return num_waiting

    def shutdown(self) -> bool:
        self._closes = True
        return True

    def close(self) -> None:
        """Shut down, unless a signal took this node away: the meeting goes on for the others then."""
        if self._closes:
            super().shutdown()

    def share(self, failures: Sequence[WorkerFailure]) -> None:
        """Let the others know of the failures that ended the job here, and wait until they do."""
        if self._round is None:
            return
        store, deadline_s = self._round.store, time.monotonic() + FAREWELL_GRACE_S
        # The host of the store may have failed as well, and be gone: that is no cause.
        with contextlib.suppress(*_STORE_GONE):
            # The store counts, for clocks of hosts differ.
            order = int(store.add(_ORDER, 1))
            values = json.dumps([replace(failure, order=order).to_json() for failure in failures])
            store.set(f"{_FAILURES}{self._round.rank}", values)
            store.set(_ENDED, "yes")
            store.add(_NUM_INFORMED, 1)
            while store.add(_NUM_INFORMED, 0) < self._round.world_size and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)

    def failures(self) -> list[WorkerFailure]:
        """Failures that ended the job, on all nodes, as far as they can be known here."""
        found: list[WorkerFailure] = []
        if self._round is not None:
            store = self._round.store
            with contextlib.suppress(*_STORE_GONE):
                for rank in range(self._round.world_size):
                    if store.check([f"{_FAILURES}{rank}"]):
                        found += map(WorkerFailure.from_json, json.loads(store.get(f"{_FAILURES}{rank}")))
        return found

    def _raise_if_ended(self) -> None:
        if self._round is None or not self._round.store.check([_ENDED]):
            return
        known = self.failures()
        with contextlib.suppress(*_STORE_GONE):
            self._round.store.add(_NUM_INFORMED, 1)  # its host may go now
        raise EndedElsewhereError(known)


def _given_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.config[_HANDLER]
    return handler


rendezvous_handler_registry.register(_BACKEND, _given_handler)


class _Starts(logging.Handler):
    """Handler of torch's events, each of which is a record with a line of JSON: notes the workers that are started."""

    def __init__(self, log: EventLog, max_restarts: int) -> None:
        super().__init__()
        self._log = log
        self._max_restarts = self.restarts_left = max_restarts
        self._num_rounds = 0
        self._started: dict[int, dict[str, int]] = {}
        """By slot: workers that run."""

    def emit(self, record: logging.LogRecord) -> None:
        event = Event.deserialize(record.getMessage())
        if event.name != "torchelastic.worker.status.START":
            return
        found = event.metadata
        details = json.loads(str(found["metadata"]))
        (slot,), rank, pid = details["local_rank"], int(found["global_rank"] or 0), int(found["worker_id"] or 0)
        if not self._started:
            self._num_rounds += 1
            self.restarts_left = self._max_restarts - int(found["agent_restarts"] or 0)
            self._log.write(
                "round",
                number=self._num_rounds,
                group_rank=found["group_rank"],
                num_nodes=details["group_world_size"],
                world_size=details["role_world_size"][0],
                restarts_left=self.restarts_left,
            )
        self._started[slot] = {"slot": slot, "rank": rank, "pid": pid}
        self._log.write("worker-started", **self._started[slot])

    def end(self) -> None:
        """Note that the workers have ended."""
        for worker in self._started.values():
            self._log.write("worker-exited", **worker)
        self._started.clear()


def run_restart_job(job: RestartJob, log: EventLog, tell: Callable[[str], None]) -> RestartEnd:
    """Run this node's part of the job to its end; ``tell`` prints on the console what happens meanwhile.

    Raises what keeps it from starting or running.
    """
    config = job.config
    _handle_signals(config.signals_to_handle)
    if config.max_nodes > 1:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    starts = _Starts(log, config.max_restarts)

    def note_restart(reason: str, uses_restart: bool) -> None:
        starts.end()
        log.write("restart", reason=reason, uses_restart=uses_restart)
        left = f"; {starts.restarts_left - 1} restarts left" if uses_restart else ""
        tell(f"{reason}; all workers of {job.node_name} are started again{left}")

    shared = SharedEnd(open_meeting(_parameters_of(config), job.token, job.card), note_restart)
    given = replace(config, rdzv_backend=_BACKEND, rdzv_configs={**config.rdzv_configs, _HANDLER: shared})
    server = {} if job.health_check_server is None else {"health_check_server": job.health_check_server}
    torchs = logging.getLogger(f"torchelastic-events-{config.event_log_handler}")
    torchs.addHandler(starts)
    try:
        values = record(launch_agent)(given, job.entrypoint, list(job.arguments), **server) or {}
        return RestartEnd(Outcome(None, "all workers ended well"), values)
    except _EndedBeforeError:
        return RestartEnd(Outcome(None, "all workers ended well"), {})
    except ChildFailedError as error:
        failures = [_failure_of(job.node_name, rank, failure) for rank, failure in error.failures.items()]
        for failure in failures:
            log.write("worker-failed", **{**failure.to_json(), "traceback": failure.traceback[-4000:]})
        shared.share(failures)
        return RestartEnd(_outcome_of(shared.failures() or failures, job.node_name, str(error)), {}, error)
    except EndedElsewhereError as error:
        return RestartEnd(_outcome_of(error.failures, job.node_name, str(error)), {})
    finally:
        torchs.removeHandler(starts)
        starts.end()
        shared.close()


def _parameters_of(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def _outcome_of(failures: Sequence[WorkerFailure], node_name: str, unknown: str) -> Outcome:
    """The job's end, as this node reports it; ``unknown`` is its text where no failure is known."""
    if not failures:
        return Outcome(Category.WORKER, unknown)
    cause, reason = decide_cause(failures)
    # Each traceback is shown once for the whole job, where it happened.
    detail = cause.traceback if cause.node == node_name else ""
    return Outcome(Category.WORKER, f"{describe_failure(cause)} ({reason})", detail)


def _failure_of(node_name: str, rank: int, failure: ProcessFailure) -> WorkerFailure:
    message: Any = failure.message
    traceback = ""
    if isinstance(message, dict):
        traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    else:
        # Where there is no error file torch fills in an advertisement for them, or repeats the signal.
        message = "its own output says why" if failure.exitcode >= 0 else ""
    return WorkerFailure(
        rank=rank,
        local_rank=failure.local_rank,
        node=node_name,
        pid=failure.pid,
        exit_code=failure.exitcode,
        time_s=float(failure.timestamp),
        message=shortened(str(message).strip()),
        traceback=shortened(traceback, MOST_TRACED),
    )


def _handle_signals(names: str) -> None:
    """Turn signals into exceptions from now on, not only once workers run: what was made is then taken away again."""

    def stop(number: int, _frame: object) -> None:
        raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))

    for name in filter(None, (one.strip() for one in names.split(","))):
        signal.signal(signal.Signals[name], stop)
