"""How does a pool hold its workers? Handles on the forked processes, seen from the process that owns them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

from remesh.errors import PeerError
from remesh.testing.rank_messages import Answer, Call, FunctionName, enter

_BODIES = "remesh.testing.rank_worker"
_PRELOADED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", _BODIES)
_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_STACKS_TIMEOUT_S = 2.0
_STACKS_POLL_S = 0.05


def fork_server() -> ForkServerContext:
    """The context from which workers are forked; its server imports torch once, when the first one is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class StoreHost:
    """The process with the key-value store. Blocks until the store listens."""

    def __init__(self, context: ForkServerContext) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=enter, args=(FunctionName(_BODIES, "host_store"), theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_TIMEOUT_S):
            raise PeerError(f"starting the store of a pool of ranks: it did not listen after {_START_TIMEOUT_S:.0f} s")
        self.port: int = pickle.loads(self._pipe.recv_bytes())

    def end(self) -> None:
        self._pipe.close()
        _end(self._process)


class Worker:
    """One forked process that answers calls."""

    def __init__(self, context: ForkServerContext, log_path: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self._log_path = log_path
        self._log_read = 0
        self._process = context.Process(
            target=enter, args=(FunctionName(_BODIES, "serve_calls"), theirs, str(log_path)), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def post(self, call: Call) -> None:
        """Send a call. A worker that died since it was seen alive is found when its answer is waited for."""
        self.new_output()
        try:
            self.pipe.send_bytes(pickle.dumps(call))
        except BrokenPipeError:
            return

    def take_answer(self) -> Answer | None:
        """The answer that the pipe is ready to give; None when the process ended without one."""
        try:
            answer: Answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
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
        if not self.is_alive or self._process.pid is None:
            return text
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline_s = time.monotonic() + _STACKS_TIMEOUT_S
        latest = ""
        # faulthandler writes all stacks in one go: they are complete when nothing more comes.
        while time.monotonic() < deadline_s:
            time.sleep(_STACKS_POLL_S)
            new = self.new_output()
            if latest and not new:
                break
            latest += new
        return text + latest

    def describe_end(self) -> str:
        """How a process that is gone went: ``"died by SIGKILL"`` or ``"left with exit code 3"``."""
        self._process.join(_JOIN_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"died by {signal.Signals(-code).name}"
        return f"left with exit code {code}"

    def end(self) -> None:
        """Let an idle process end; one that does not is killed."""
        self.pipe.close()
        _end(self._process)

    def kill(self) -> None:
        """End the process whatever it does."""
        self._process.kill()
        self.end()


def _end(process: multiprocessing.context.ForkServerProcess) -> None:
    process.join(_JOIN_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join(_JOIN_TIMEOUT_S)
