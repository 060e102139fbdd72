"""``remesh run`` in a forked process, with workers that are forked of one that has loaded their modules already.

An agent starts the process of which its workers are forked, and that loads their modules for three seconds of processor
time. Here it is forked of the agent before that has a thread, and shares what the server of forked programs has loaded.

    agent      fork, then `remesh run`: `Preload` ──order──> the other one: `fork_workers` ──fork──> worker: its script

All else is as ever: workers are the agent's children, and are asked for in the same words. `test_preload` has what this
leaves out, how the other process is started, what it loads and why it may refuse.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

from remesh.cli import main
from remesh.elasticity.launch import preloading
from remesh.elasticity.node.preload import Preload
from remesh.elasticity.node.preloaded import fork_workers
from remesh.foundation.exit_codes import ExitCode
from tests.procs import main_script

_MAX_ORDER_BYTES = 1 << 16


class _Forking:
    """The process of which workers are forked; as `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _fork_preload() -> type[Preload]:
    """Fork the process, which waits for its order; returns the class that gives it one. Returns in the agent alone."""
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        own.close()
        _serve(others)
    others.close()

    class Forked(Preload):
        def start_process(self, line: socket.socket) -> Any:
            order = json.dumps({"modules": self.plan.modules, "command": self.plan.command})
            socket.send_fds(own, [order.encode()], [line.fileno()])
            return _Forking(pid)

    return Forked


def _serve(orders: socket.socket) -> None:
    """Take an order, and fork workers as they are asked for. Ends the process, of a worker too."""
    order, descriptors, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 1)
    if not order:
        os._exit(ExitCode.OK)  # the agent has ended without
    told = json.loads(order)
    for name in told["modules"]:
        importlib.import_module(name)
    line = socket.socket(fileno=descriptors[0])
    fork_workers(line)
    for closed in (line, orders):
        closed.detach()  # with all that a worker has not, whose own files may have the numbers by now
    try:
        main_script.run(told["command"][2:])  # after `python -u`
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(ExitCode.FAILED)
    sys.exit(ExitCode.OK)


if __name__ == "__main__":
    preloading.Preload = _fork_preload()  # type: ignore[misc]
    main(prog_name="remesh")
