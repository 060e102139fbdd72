"""Restart mode: torchrun's contract, kept by torch's own agent, with causes, events and an end that all nodes see.

torch's ``LocalElasticAgent`` does what it does under torchrun: rendezvous, ranks, environment, logs, the monitor loop,
restarts while they remain, restarts by change of membership that use none up, the exit barrier. Around it:

- every start, failure, restart and end is an event (JSON lines, metrics);
- a failure that ends the job is left in the round's store, so that the other agents end within a monitor interval with
  that cause, instead of sitting in a collective whose peers are gone;
- the cause that is reported is the earliest failure of any node that follows from no other;
- ``--shutdown-timeout`` holds for every stop: a worker that ignores SIGTERM is killed after it;
- workers of every attempt meet in a store of their own (:mod:`remesh.elasticity.launch.meeting`), so that none waits
  for an address that the attempt before left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from remesh.elasticity.launch.meeting import MeetingPlace, open_meeting
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
from remesh.foundation.torch_private import LOCAL_AGENT, check_members
from remesh.wire.token import Token

check_members(LOCAL_AGENT)
_ENDED = "remesh/ended"
_FAILURES = "remesh/failures/"
_HEARD = "remesh/heard"
_ORDER = "remesh/order"
DEFAULT_SHUTDOWN_S = 30
FAREWELL_S = 15.0
"""How long an agent whose workers failed for good waits until the others know, for it may host their store.

As long as torch's meeting waits for a sign of life: a node that is silent for longer counts as lost.
"""
_POLL_S = 0.02
_STORE_GONE = (dist.DistError, RuntimeError)
"""What calls of a store raise once its host is gone."""


@dataclass(frozen=True, slots=True)
class RestartJob:
    """The job to run, as torch's launcher describes it, with its token and its card."""

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    arguments: tuple[str, ...]
    card: JobCard
    token: Token
    node_name: str

    @property
    def command(self) -> tuple[str, ...]:
        """Program and arguments of a worker; empty when it is a function."""
        return (self.entrypoint, *self.arguments) if isinstance(self.entrypoint, str) else ()


@dataclass(frozen=True, slots=True)
class RestartEnd:
    """How this node's part of a job ended."""

    outcome: Outcome
    result: RunResult | None
    """What torch's agent says of the workers here; None when another node ended the job, or this one was late."""


class EndedElsewhereError(Exception):
    """Another node's workers failed for good: this node's are to end too."""

    def __init__(self, failures: Sequence[WorkerFailure]) -> None:
        """``failures``: those that are known; none if the store went with the other node."""
        super().__init__("another node's workers failed, and no restarts are left on that node")
        self.failures = failures


class RestartAgent(LocalElasticAgent):
    """torch's agent, seen: it tells what happens and shares the end of the job with the others."""

    def __init__(self, job: RestartJob, meeting: MeetingPlace, log: EventLog, tell: Callable[[str], None]) -> None:
        config = job.config
        assert config.logs_specs is not None
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=job.entrypoint,
            args=job.arguments,
            rdzv_handler=meeting.handler,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            numa_options=config.numa_options,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
            virtual_local_rank=config.virtual_local_rank,
        )
        super().__init__(
            spec=spec,
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=DEFAULT_SHUTDOWN_S if config.shutdown_timeout is None else config.shutdown_timeout,
        )
        self._log = log
        self._tell = tell
        self._node_name = job.node_name
        self._num_rounds = 0
        self._last_state = WorkerState.INIT
        self._failures: Sequence[WorkerFailure] = ()
        """Of this node's workers in this round."""
        self._group: WorkerGroup | None = None

    # --- what torch's loop calls ---

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._group, self._failures = worker_group, ()
        self._num_rounds += 1
        self._log.write(
            "round",
            number=self._num_rounds,
            group_rank=worker_group.group_rank,
            num_nodes=worker_group.group_world_size,
            world_size=worker_group.workers[0].world_size,
            restarts_left=self._remaining_restarts,
        )
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        # When one worker fails, the context itself stops the others, and gives them 30 s whatever was asked for.
        self._pcontext.close = self._bounded(self._pcontext.close)  # type: ignore[method-assign]
        for local_rank, pid in pids.items():
            rank = worker_group.workers[local_rank].global_rank
            self._log.write("worker-started", slot=local_rank, rank=rank, pid=pid)
        return pids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failed = self._last_state is not WorkerState.HEALTHY
        reason = "workers failed" if failed else "another node wants to join, or has restarted"
        self._log.write("restart", reason=reason, uses_restart=failed)
        left = f"; {self._remaining_restarts} restarts left" if failed else ""
        cause = describe_failure(decide_cause(self._failures)[0]) if failed and self._failures else reason
        self._tell(f"{cause}; all workers of {self._node_name} are started again{left}")
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)
        self._note_exits(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        store = _store_of(worker_group)
        self._last_state = result.state
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            failures = [_failure_of(self._node_name, rank, failure) for rank, failure in result.failures.items()]
            self._failures = failures
            for failure in failures:
                self._log.write("worker-failed", **{**failure.to_json(), "traceback": failure.traceback[-4000:]})
            # Who hosts the store may have failed as well, and be gone: that is no cause.
            with contextlib.suppress(*_STORE_GONE):
                self._share(worker_group, failures, is_end=self._remaining_restarts == 0)
        elif result.state is WorkerState.HEALTHY and store.check([_ENDED]):
            known = self.all_failures()
            _say_heard(store)  # its host may go now
            raise EndedElsewhereError(known)
        elif result.state is WorkerState.SUCCEEDED:
            self._note_exits(worker_group)
            _say_heard(store)
        return result

    def _bounded(self, close: Callable[..., None]) -> Callable[..., None]:
        def bounded(death_sig: signal.Signals | None = None, timeout: int = self._shutdown_timeout) -> None:
            close(death_sig, timeout)

        return bounded

    # --- the end ---

    def all_failures(self) -> list[WorkerFailure]:
        """Failures of this round on all nodes, as far as they are known here."""
        group = self._group
        if group is None:
            return []
        store = _store_of(group)
        found: list[WorkerFailure] = []
        try:
            for index in range(group.group_world_size or 0):
                if store.check([f"{_FAILURES}{index}"]):
                    values = json.loads(store.get(f"{_FAILURES}{index}"))
                    found += [WorkerFailure.from_json(value) for value in values]
        except _STORE_GONE:
            # The store was another node's and is gone with it; what is known here must do.
            return found or list(self._failures)
        return found

    def wait_until_heard(self) -> None:
        """Stay until the other agents know how the job ended."""
        group = self._group
        assert group is not None
        deadline_s = time.monotonic() + FAREWELL_S
        try:
            while _store_of(group).add(_HEARD, 0) < (group.group_world_size or 0) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        except _STORE_GONE:
            return

    def _share(self, group: WorkerGroup, failures: Sequence[WorkerFailure], *, is_end: bool) -> None:
        store = _store_of(group)
        # The store counts, for clocks of hosts differ.
        order = int(store.add(_ORDER, 1))
        values = json.dumps([replace(failure, order=order).to_json() for failure in failures])
        store.set(f"{_FAILURES}{group.group_rank}", values)
        if is_end:
            store.set(_ENDED, "yes")
            _say_heard(store)

    def _note_exits(self, group: WorkerGroup) -> None:
        for worker in group.workers:
            pid = worker.id
            self._log.write("worker-exited", slot=worker.local_rank, rank=worker.global_rank, pid=pid)


def run_restart_job(job: RestartJob, log: EventLog, tell: Callable[[str], None]) -> RestartEnd:
    """Run this node's part of the job to its end; ``tell`` says on the console what happens meanwhile.

    Raises what keeps it from starting or running.
    """
    _handle_signals(job.config.signals_to_handle)
    if job.config.max_nodes > 1:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    parameters = RendezvousParameters(
        backend=job.config.rdzv_backend,
        endpoint=job.config.rdzv_endpoint,
        run_id=job.config.run_id,
        min_nodes=job.config.min_nodes,
        max_nodes=job.config.max_nodes,
        local_addr=job.config.local_addr,
        **job.config.rdzv_configs,
    )
    meeting = open_meeting(parameters, job.token, job.card)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = job.config.signals_to_handle
    metrics.initialize_metrics(metrics.MetricsConfig(job.config.metrics_cfg))
    agent = RestartAgent(job, meeting, log, tell)
    # A node that a signal takes away must not close the meeting for the others.
    closes = True
    try:
        result = _run_recorded(agent, job.config.event_log_handler)
        # None: the job had ended while this node waited to be let in.
        if result is None or not result.is_failed():
            return RestartEnd(Outcome(None, "all workers ended well"), result)
        agent.wait_until_heard()
        _leave_error_file(job, result)
        unknown = f"workers of {job.node_name} failed"
        return RestartEnd(_outcome_of(agent.all_failures(), job.node_name, unknown), result)
    except EndedElsewhereError as error:
        return RestartEnd(_outcome_of(error.failures, job.node_name, str(error)), None)
    except SignalException:
        closes = False
        raise
    finally:
        if closes:
            meeting.handler.shutdown()


def _run_recorded(agent: RestartAgent, handler: str) -> RunResult | None:
    """Run the agent; torch's own events end with one of how it ended, as under torchrun."""
    try:
        result: RunResult | None = agent.run()
    except BaseException:
        events.record(agent.get_event_failed(), handler)
        raise
    events.record(agent.get_event_succeeded(), handler)
    return result


def _outcome_of(failures: Sequence[WorkerFailure], node_name: str, unknown: str) -> Outcome:
    """The job's end, as this node tells it; ``unknown`` is what to say where no failure is known."""
    if not failures:
        return Outcome(Category.WORKER, unknown)
    cause, reason = decide_cause(failures)
    # Each traceback is shown once for the whole job, where it happened.
    detail = cause.traceback if cause.node == node_name else ""
    return Outcome(Category.WORKER, f"{describe_failure(cause)} ({reason})", detail)


@record
def _raise(error: ChildFailedError) -> None:
    raise error


def _leave_error_file(job: RestartJob, result: RunResult) -> None:
    """Hand the first failure on to whoever started this agent, by torch's error file, as torchrun does."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or not result.failures:
        return
    try:
        _raise(ChildFailedError(name=str(job.entrypoint), failures=result.failures))
    except ChildFailedError:
        return


def _failure_of(node_name: str, rank: int, failure: ProcessFailure) -> WorkerFailure:
    message: Any = failure.message
    traceback = ""
    if isinstance(message, dict):
        traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    else:
        # Where there is no error file torch fills in an advertisement for them, or says the signal once more.
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


def _say_heard(store: dist.Store) -> None:
    """Tell an agent that may wait to go that this one needs its store no more; that one may be gone already."""
    with contextlib.suppress(*_STORE_GONE):
        store.add(_HEARD, 1)


def _store_of(group: WorkerGroup) -> dist.Store:
    """The store of the group's round; torch sets it at every meeting, and types it as None."""
    return cast(dist.Store, group.store)


def _handle_signals(names: str) -> None:
    """Turn signals into exceptions from now on, not only once workers run: what was made is then taken away again."""

    def stop(number: int, _frame: object) -> None:
        raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))

    for name in filter(None, (one.strip() for one in names.split(","))):
        signal.signal(signal.Signals[name], stop)
