"""Handles on the pool's forked workers, in the process that owns them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterable
from multiprocessing.context import ForkServerContext
from pathlib import Path

from remesh.foundation.errors import PeerError
from remesh.foundation.linux.procfs import work_of
from remesh.testbed.quiet_limit import QuietLimit
from remesh.testbed.rank_messages import JOINED, FunctionName, RankAnswer, RankCall, RankEntry, enter

_BODIES = "remesh.testbed.rank_worker"
_PRELOADED = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    "torch._dynamo",  # which the first step of any optimizer imports
    "remesh.elasticity.training.training_worker",
    _BODIES,
)
START_TIMEOUT_S = 60.0
START_POLL_S = 1.0
"""Between looks at the progress of what is being started."""
_JOIN_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 60.0
"""A process whose pipe has ended is on its way out; the fork server reports how, when it gets to it."""
_STACKS_TIMEOUT_S = 30.0
_STACKS_GRACE_S = 0.5
"""Stacks are written line by line; on a busy machine there may be a pause between two."""
_STACKS_POLL_S = 0.05


def fork_server() -> ForkServerContext:
    """The context from which workers are forked; its server imports torch once, when the first one is."""
    # Read by the numeric libraries when the server imports them: forking wants no threads before it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def start_limit(pids: Iterable[int | None]) -> QuietLimit:
    """The time that processes which are being started may make no progress."""
    started = [pid for pid in pids if pid is not None]
    return QuietLimit(lambda: sum(work_of(pid) for pid in started), START_TIMEOUT_S)


class StoreHost:
    """The process with the key-value store of a pool. Blocks until the store listens."""

    def __init__(self, context: ForkServerContext, entry: RankEntry | None, address: str, folder: Path) -> None:
        self._pipe, theirs = context.Pipe()
        arguments = (FunctionName(_BODIES, "host_store"), theirs, entry, address, str(folder))
        self._process = context.Process(target=enter, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        limit = start_limit([self._process.pid])
        while not self._pipe.poll(START_POLL_S):
            if limit.is_over():
                raise self._not_listening(folder, f"did nothing for {START_TIMEOUT_S:.0f} s")
        try:
            self.place: tuple[str, int] = (address, pickle.loads(self._pipe.recv_bytes()))
        except EOFError as error:
            raise self._not_listening(folder, "ended") from error

    def _not_listening(self, folder: Path, why: str) -> PeerError:
        wrote = ""
        with contextlib.suppress(FileNotFoundError):  # who hosts the store removes its folder
            wrote = (folder / "store.log").read_text(errors="replace")
        return PeerError(f"starting the store of a pool of ranks: it {why}, expected it to listen; it wrote: {wrote}")

    def end(self) -> None:
        self._pipe.close()
        _end(self._process)


class RankWorker:
    """One forked process that answers calls, on one host for all its life."""

    def __init__(self, context: ForkServerContext, entry: RankEntry | None, log_path: Path) -> None:
        self.entry = entry
        self.pipe, theirs = context.Pipe()
        self._log_path = log_path
        self._log_read = 0
        arguments = (FunctionName(_BODIES, "serve_calls"), theirs, entry, str(log_path))
        self._process = context.Process(target=enter, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def post(self, call: RankCall) -> None:
        """Send a call. A worker that died since it was seen alive is found when its answer is waited for."""
        self.new_output()
        try:
            self.pipe.send_bytes(pickle.dumps(call))
        except BrokenPipeError:
            return

    def take_answer(self) -> RankAnswer | bytes | None:
        """What the pipe has: `JOINED`, then the answer; None when the process ended without one."""
        try:
            told = self.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return None
        answer: RankAnswer | bytes = told if told == JOINED else pickle.loads(told)
        return answer

    def new_output(self) -> str:
        """What the process wrote since this was last asked."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_read)
                data = log.read()
        except FileNotFoundError:
            return ""
        self._log_read += len(data)
        return data.decode(errors="replace")

    def dump_stacks(self) -> str:
        """Ask the process for the stacks of its threads; what it wrote, these at the end."""
        text = self.new_output()
        if not self.is_alive or self.pid is None:
            return text
        os.kill(self.pid, signal.SIGUSR1)
        deadline_s = time.monotonic() + _STACKS_TIMEOUT_S
        latest = ""
        more = QuietLimit(lambda: len(latest), _STACKS_GRACE_S)
        # They are complete when nothing more comes.
        while time.monotonic() < deadline_s and not (more.is_over() and latest):
            time.sleep(_STACKS_POLL_S)
            latest += self.new_output()
        return text + latest

    def describe_end(self) -> str:
        """How a process that is gone went: ``"died by SIGKILL"`` or ``"left with exit code 3"``."""
        self._process.join(_EXIT_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"died by {signal.Signals(-code).name}"
        return f"left with exit code {code}"

    def end(self) -> None:
        """Let an idle process end; one that does not is killed. Nothing can be received from it any more."""
        self.pipe.close()
        _end(self._process)

    def kill(self) -> None:
        """End the process whatever it does."""
        self._process.kill()


def _end(process: multiprocessing.context.ForkServerProcess) -> None:
    process.join(_JOIN_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join(_JOIN_TIMEOUT_S)
