"""Who starts the ranks on a testbed, and who waits for them? One process per rank, forked from one that has torch.

A run starts a fresh process for every rank and ends them all; nothing of a broken group reaches the next run. A rank
that does not answer in time is asked for the stacks of its threads before it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remesh.errors import ConfigError, Error, PeerError
from remesh.testbed.commands import BedNames
from remesh.testbed.inside import Door
from remesh.testbed.rank_task import Answer, Task, enter

_STORE_PORT = 29400
"""Free in a namespace that holds nothing else."""
_GROUP_MARGIN_S = 30.0
"""The group waits longer than the run: a hang is found by its stacks, not by gloo's timeout."""
_GRACE_S = 5.0
"""How long the other ranks may go on once one has failed."""
_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_STACKS_S = 0.5
_MAX_OUTPUT_CHARS = 12_000
_PRELOADED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")


class RanksFailed(Error, RuntimeError):
    """A run on a testbed did not return on every rank; the text has each rank's traceback or stacks."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a bed keeps its things."""

    names: BedNames
    folder: Path
    """For logs and the like; removed with the bed."""

    @property
    def hosts_file(self) -> Path:
        """Names and addresses of all hosts, in the form of ``/etc/hosts``."""
        return self.folder / "hosts"

    def door_of(self, host: str) -> Door:
        """What a process needs to enter a host."""
        return Door(self.names.namespace_of(host), host, str(self.hosts_file))

    def write_hosts_file(self) -> None:
        """Make the file, before anybody enters."""
        addresses = [(self.names.address_of(host), host) for host in self.names.spec.names]
        known = [("127.0.0.1", "localhost"), (self.names.switch_address, "switch"), *addresses]
        self.hosts_file.write_text("".join(f"{address} {name}\n" for address, name in known))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    rank: int
    host: str


def places(names: BedNames, ranks_per_host: int | Mapping[str, int]) -> tuple[Place, ...]:
    """Ranks host by host, in order of hosts; a host that the mapping leaves out has none."""
    if isinstance(ranks_per_host, int):
        ranks_per_host = dict.fromkeys(names.spec.names, ranks_per_host)
    for host in ranks_per_host:
        names.spec.index_of(host)
    hosts = [host for host in names.spec.names for _ in range(ranks_per_host.get(host, 0))]
    if not hosts or min(ranks_per_host.values()) < 0:
        raise ConfigError(f"placing ranks on a testbed: found {ranks_per_host} ranks per host, expected at least one")
    return tuple(Place(rank, host) for rank, host in enumerate(hosts))


def fork_server() -> ForkServerContext:
    """The context from which ranks are forked; its server imports torch once, when the first one is."""
    # Read by the numeric libraries when the server imports them: forking wants no threads before it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, "remesh.testbed.rank_body"])
    return context


class StoreProcess:
    """The process with the key-value store of a bed. Blocks until the store listens."""

    def __init__(self, context: ForkServerContext, where: Site) -> None:
        self._pipe, theirs = context.Pipe()
        log = where.folder / "store.log"
        door = Door(where.names.switch, "switch", str(where.hosts_file))
        arguments = ("host_store", door, where.names.switch_address, _STORE_PORT, str(log), theirs)
        self._process = context.Process(target=enter, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            if not self._pipe.poll(_START_TIMEOUT_S):
                raise EOFError
            self._pipe.recv_bytes()
        except EOFError as error:
            raise PeerError(
                f"starting the store of a testbed: it did not listen after {_START_TIMEOUT_S:.0f} s; it wrote: "
                f"{log.read_text(errors='replace') if log.exists() else ''}"
            ) from error

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        _end(self._process)


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a run do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    number: int
    """Counts the runs of a bed."""
    timeout_s: float


class Run:
    """Ranks at work; a context manager that ends them. The owner may change links meanwhile."""

    def __init__(self, context: ForkServerContext, site: Site, where: Sequence[Place], job: Job) -> None:
        self.places = tuple(where)
        self._what = f"{job.function.__module__}.{job.function.__qualname__}"
        self._deadline_s = time.monotonic() + job.timeout_s
        self._logs = [site.folder / f"run-{job.number}-rank-{place.rank}.log" for place in where]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._killed: set[int] = set()
        try:
            call = pickle.dumps((job.function, job.args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"running {self._what} on a testbed: it cannot be sent to another process ({error}); define it at the "
                "top of a module and pass plain values"
            ) from error
        for place, log in zip(where, self._logs, strict=True):
            task = Task(
                door=site.door_of(place.host),
                rank=place.rank,
                world_size=len(where),
                store_address=site.names.switch_address,
                store_port=_STORE_PORT,
                store_prefix=f"run-{job.number}",
                group_timeout_s=job.timeout_s + _GROUP_MARGIN_S,
                call=call,
                log_path=str(log),
            )
            mine, theirs = context.Pipe()
            process = context.Process(target=enter, args=("run_rank", task, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def kill(self, rank: int) -> None:
        """SIGKILL a rank; its result will be None."""
        self._killed.add(rank)
        self._processes[rank].kill()

    def wait(self) -> list[Any]:
        """The results in order of rank, once all ranks have returned; None for those that were killed.

        Blocks until the run's time is up at the latest. Raises `RanksFailed` when a rank raises, dies by itself or has
        not returned by then.
        """
        ends: dict[int, str] = {}
        results: list[Any] = [None] * len(self.places)
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left_s := self._deadline_s - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left_s):
                rank = waiting.pop(pipe)
                failure = self._take(rank, results)
                if failure and rank not in self._killed:
                    ends[rank] = failure
                    self._deadline_s = min(self._deadline_s, time.monotonic() + _GRACE_S)
        for rank in waiting.values():
            ends[rank] = f"stuck\n{self._stacks(rank)}"
        self.end()
        if ends:
            what = f"running {self._what} on {len(self.places)} ranks of a testbed"
            raise RanksFailed("\n".join([what, *self._tell(ends)]))
        return results

    def end(self) -> None:
        """Kill the ranks that still run."""
        for process in self._processes:
            process.kill()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            _end(process)

    def _take(self, rank: int, results: list[Any]) -> str:
        """Keep the result of a rank whose pipe is ready; else say how it ended."""
        try:
            answer: Answer = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_JOIN_TIMEOUT_S)
            return f"died with exit code {self._processes[rank].exitcode}\n{self._output(rank)}"
        if answer.result is None:
            return f"raised\n{answer.traceback}\n{self._output(rank)}"
        results[rank] = pickle.loads(answer.result)
        return ""

    def _tell(self, ends: Mapping[int, str]) -> list[str]:
        return [f"--- rank {rank} on {self.places[rank].host} {end}" for rank, end in ends.items()]

    def _stacks(self, rank: int) -> str:
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(_STACKS_S)
        return self._output(rank)

    def _output(self, rank: int) -> str:
        try:
            text = self._logs[rank].read_text(errors="replace")
        except FileNotFoundError:
            return ""
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("[Gloo] Rank "))
        return kept[-_MAX_OUTPUT_CHARS:]


def _end(process: BaseProcess) -> None:
    process.join(_JOIN_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join(_JOIN_TIMEOUT_S)
