"""``remesh run`` whose workers are forked of a process that has torch: a test tool that saves each worker's imports.

An agent starts its workers as torchrun does, each in a fresh Python that loads torch for seconds. Here a second
process is forked of the agent before that has a thread, and forks a worker whenever the agent would start one:

    agent                      second process          between       worker
    variables, streams   ──>   forks            ──>    forks   ──>   its own streams and variables; runs the script
    its process id       <──   waits for it     <──    ends

The agent is a subreaper for that moment, so a worker is its child as ever: its exit status comes from the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing import api as process_contexts
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from remesh.cli import main
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.linux.calls import as_subreaper
from tests.procs import main_script

_NUM_DESCRIPTORS: Final = 3
_MAX_ANSWER_BYTES: Final = 100
_POLL_S: Final = 0.01


class _ForkedWorker:
    """A child of this process that `subprocess` did not start; as `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
            time.sleep(_POLL_S)
        return code


def _fork_worker(
    line: socket.socket, command: Sequence[str], variables: Mapping[str, str], streams: Sequence[IO[Any] | None]
) -> _ForkedWorker:
    """Ask the second process for a worker."""
    with contextlib.ExitStack() as stack:
        request = os.memfd_create("request")
        stack.callback(os.close, request)
        os.write(request, json.dumps({"command": list(command), "variables": dict(variables)}).encode())
        numbers = [number if one is None else one.fileno() for number, one in enumerate(streams, 1)]
        with as_subreaper():
            socket.send_fds(line, [b"."], [request, *numbers])
            answer = line.recv(_MAX_ANSWER_BYTES)
    assert answer, "the process that forks workers has ended"
    return _ForkedWorker(int(answer))


def _serve(line: socket.socket) -> None:
    """Fork a worker at each request. Ends the process, of a worker too."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(line, 1, _NUM_DESCRIPTORS)
        if not descriptors:
            os._exit(ExitCode.OK)  # the agent has ended
        hears, tells = os.pipe()
        if (between := os.fork()) == 0:
            if (worker := os.fork()) == 0:
                line.detach()  # it is closed below, and the worker's own files may get its number
                _run_worker(descriptors)
            os.write(tells, str(worker).encode())
            os._exit(ExitCode.OK)
        os.close(tells)
        os.waitpid(between, 0)  # only then is the worker the agent's
        line.send(os.read(hears, _MAX_ANSWER_BYTES))
        for descriptor in (hears, *descriptors):
            os.close(descriptor)


def _run_worker(descriptors: Sequence[int]) -> None:
    """Run the script as a worker in a session of its own. Ends the process."""
    request, *streams = descriptors
    os.setsid()
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
    asked = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(asked["variables"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()
    torch.default_generator.seed()
    code = ExitCode.OK
    try:
        main_script.run(asked["command"][2:])  # after `python -u`
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = ExitCode.FAILED
    sys.exit(code)


def _fork_workers_from_now_on() -> None:
    """Fork the second process; returns in the agent alone."""
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        own.close()
        _serve(others)
    others.close()

    class Forking(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            return _fork_worker(own, args, env, [self._stdout, self._stderr])

    process_contexts.get_subprocess_handler = Forking  # made for a site to put its own in its place


if __name__ == "__main__":
    _fork_workers_from_now_on()
    main(prog_name="remesh")
