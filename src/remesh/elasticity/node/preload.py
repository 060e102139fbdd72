"""Workers forked of one process that has loaded their modules, instead of each loading them by itself.

A :class:`Preload` starts that process beside the agent (what it does there is in
:mod:`remesh.elasticity.node.preloaded`) and asks it for workers. It is a saving, never a need: whenever it cannot give
what a plain start would give, it says once why, and the worker is started plainly.

    agent (a subreaper for the moment)      preloaded process            between       worker
    request, with descriptors          ──>  forks                   ──>  forks    ──>  waits
    the worker's id                    <──  waits for it            <──  ends
    it is my child; go                 ─────────────────────────────────────────────>  runs the script

So a worker is a child of the agent, as if that had started it: its exit status comes from the kernel, its death leaves
nothing behind, and the preloaded process may die without harm to it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from torch.distributed.elastic.multiprocessing import api as process_contexts
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from remesh.elasticity.node.preloaded import MAX_ANSWER_BYTES, ORDER, as_text
from remesh.elasticity.node.surroundings import ignored_signals, read_surroundings
from remesh.foundation.linux.calls import as_subreaper
from remesh.foundation.linux.procfs import work_of
from remesh.foundation.torch_private import SUBPROCESS_HANDLER, check_members

check_members(SUBPROCESS_HANDLER)
QUIET_S = 60.0
"""How long the process may do nothing while it loads; forking takes some milliseconds."""
_POLL_S = 0.01
_HOOK_FOLDER = Path(__file__).with_name("preload_site")
_OF_THE_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("REMESH_EVENTS", "REMESH_LINK", "REMESH_NODE", "REMESH_SLOT"),
)
"""Variables that agents set for each worker; nothing reads them while it is loaded. All others must be the same."""


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """What is to be preloaded."""

    command: tuple[str, ...]
    """Of all workers: ``python -u script.py args``."""
    modules: tuple[str, ...]


class Preload:
    """The preloaded process as the agent sees it. A context manager; not to be used from several threads."""

    def __init__(self, plan: PreloadPlan, environment: Mapping[str, str], tell: Callable[[str], object]) -> None:
        self.plan = plan
        self._environment = _without_rank(environment)
        self._tell = tell
        self._surroundings: Mapping[str, str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._seen: tuple[int, float] = (-1, 0.0)
        self.pids: set[int] = set()
        """Processes of workers that were forked."""

    def __enter__(self) -> Self:
        """Start to load."""
        own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            self._line = own
            self._process = self.start_process(others)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start_process(self, line: socket.socket) -> subprocess.Popen[bytes]:
        """The process that loads, and hears of the agent by the other end of this line."""
        python_path = self._environment.get("PYTHONPATH")
        order = {
            "socket": line.fileno(),
            "modules": self.plan.modules,
            "path": None if python_path is None else as_text(python_path),
            "command": [as_text(part) for part in self.plan.command],
        }
        path = os.pathsep.join([str(_HOOK_FOLDER), *([python_path] if python_path else [])])
        return subprocess.Popen(
            # It gives place to a worker's command once it is known that Python goes where it is to stop.
            [self.plan.command[0], "-u", "-c", "raise SystemExit('sitecustomize was not imported')"],
            env={**self._environment, "PYTHONPATH": path, ORDER: json.dumps(order)},
            pass_fds=[line.fileno()],
            start_new_session=True,
        )

    @property
    def is_loading(self) -> bool:
        """Whether a worker that is asked for now would have to wait."""
        self._hear(0)
        return self._line is not None and self._surroundings is None

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[Any] | None]
    ) -> ForkedProcess | None:
        """A worker with this command line, environment, stdout and stderr; waits while modules are loaded.

        None: it is to be started plainly.
        """
        while self.is_loading:
            self._hear(_POLL_S)
        if self._line is None or tuple(command) != self.plan.command:
            return None
        if why := self._difference(environment):
            self._tell(f"a worker is started without the preloaded process: {why}")
            return None
        try:
            numbers = [0, *(n if one is None else one.fileno() for n, one in enumerate(streams, 1))]
            pid = self._ask(environment, numbers)
        except (OSError, ValueError) as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self.pids.add(pid)
        return ForkedProcess(pid)

    def _difference(self, environment: Mapping[str, str]) -> str | None:
        """What a plain start would give to a worker, and the preloaded process cannot."""
        assert self._surroundings is not None
        wanted = _without_rank(environment)
        changed = {*wanted.items()} ^ {*self._environment.items()}
        if changed:
            return f"{min(changed)[0]} is another than when it was started"
        now = read_surroundings()
        names = [name for name in now if now[name] != self._surroundings[name]]
        return f"{names[0]} of the agent is another than when it was started" if names else None

    def _ask(self, environment: Mapping[str, str], streams: Sequence[int]) -> int:
        """The process id of a new worker, which is a child of this process and runs. OSError if there is none."""
        assert self._line is not None
        with contextlib.ExitStack() as stack:
            request = os.memfd_create("request")
            stack.callback(os.close, request)
            asked = {
                "environment": {as_text(name): as_text(value) for name, value in environment.items()},
                "ignored_signals": ignored_signals(),
            }
            os.write(request, json.dumps(asked).encode())
            hears, tells = os.pipe()
            stack.callback(os.close, tells)
            with as_subreaper():
                try:
                    socket.send_fds(self._line, [b"."], [request, *streams, hears])
                finally:
                    os.close(hears)
                answer = self._receive(QUIET_S)
            if answer is None or "pid" not in answer:
                raise OSError("it has ended" if answer is None else str(answer))
            pid = int(answer["pid"])
            # Raises where the kernel handed it to somebody else; the worker ends then, for the pipe closes.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.write(tells, b".")
        return pid

    # --- the line ---

    def _hear(self, timeout_s: float) -> None:
        """Take the word that all is loaded, or that it will not be."""
        if self._line is None or self._surroundings is not None:
            return
        assert self._process is not None
        try:
            answer = self._receive(timeout_s)
        except (BlockingIOError, TimeoutError):
            self._look_for_progress(self._process.pid)
            return
        except OSError as error:
            self._give_up(str(error))
            return
        if answer is None:
            self._give_up(f"it ended with exit code {self._process.wait()}")
        elif "surroundings" in answer:
            self._surroundings = answer["surroundings"]
        else:
            self._give_up(str(answer.get("unfit")))

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        assert self._line is not None
        self._line.settimeout(timeout_s)
        data = self._line.recv(MAX_ANSWER_BYTES)
        return cast(dict[str, Any], json.loads(data)) if data else None

    def _look_for_progress(self, pid: int) -> None:
        work, now_s = work_of(pid), time.monotonic()
        if work != self._seen[0]:
            self._seen = work, now_s
        elif now_s - self._seen[1] > QUIET_S:
            self._give_up(f"it did nothing for {QUIET_S:g} s while it loaded modules")

    def _give_up(self, reason: str) -> None:
        self._tell(f"the preloaded process is not used, workers load their modules by themselves: {reason}")
        self._end()

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """A child of this process that `subprocess` did not start: what torch's process contexts ask of a ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; ``subprocess.TimeoutExpired`` when it does not in time."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
            time.sleep(_POLL_S)
        return code


class _ForkingHandler(SubprocessHandler):
    """torch's, with its files and signals; a worker that cannot be forked is started as ever."""

    def __init__(self, preload: Preload, *args: Any, **kwargs: Any) -> None:
        self._preload = preload
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return self._preload.fork(args, env, [self._stdout, self._stderr]) or super()._popen(args, env)


@contextlib.contextmanager
def forked_subprocesses(preload: Preload | None) -> Iterator[None]:
    """Within it, torch's process contexts start what they start by ``preload`` where that can."""
    if preload is None:
        yield
        return
    torchs = process_contexts.get_subprocess_handler
    # Made for a site to put its own in its place.
    process_contexts.get_subprocess_handler = functools.partial(_ForkingHandler, preload)
    try:
        yield
    finally:
        process_contexts.get_subprocess_handler = torchs


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OF_THE_RANK}
