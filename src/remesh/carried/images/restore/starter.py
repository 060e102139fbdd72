"""Helper process that enters new namespaces to start the init of an upper half there.

It is a process of its own, since its parent stays in the old namespaces. It waits for an order (`init`), and comes
about in one of two ways:

    Starter.fork()    a copy of this process, while that has a single thread: no second interpreter starts, and the
                      memory of both is the same pages
    Starter.spawn()   a fresh interpreter, from a process with threads
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Final, Self

from remesh.foundation.source_folder import SOURCE

_MODULE: Final = "remesh.carried.images.restore.init"


@dataclass(frozen=True, slots=True)
class Starter:
    """A process that waits for one order."""

    pid: int
    orders: int
    """Descriptor that takes the order. Once it is closed, the starter ends, and so does the init."""
    news: int
    """Descriptor on which the starter answers, and after it the init."""

    @classmethod
    def make(cls) -> Self:
        """Fork a starter if this process has a single thread, else spawn it."""
        return cls.fork() if _num_threads() == 1 else cls.spawn()

    @classmethod
    def fork(cls) -> Self:
        """Fork a copy of this process. RuntimeError if it has several threads: a copy would keep their locks."""
        if _num_threads() > 1:
            raise RuntimeError("forking the starter of an init: this process has several threads; use Starter.spawn")
        gc.freeze()
        orders_out, orders, news, news_in = _pipes()
        pid = os.fork()
        if pid == 0:
            _serve(orders_out, news_in)
        return cls._of(pid, orders_out, orders, news, news_in)

    @classmethod
    def spawn(cls) -> Self:
        """Start an interpreter as the starter."""
        from remesh.foundation.checksums import search_path  # noqa: PLC0415  # with ISA-L, which who forks does not need

        places = filter(None, [SOURCE, os.environ.get("PYTHONPATH"), search_path()])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        orders_out, orders, news, news_in = _pipes()
        arguments = [sys.executable, "-S", "-m", _MODULE, str(orders_out), str(news_in)]
        process = subprocess.Popen(
            arguments, pass_fds=(orders_out, news_in), env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        process.returncode = 0  # it is waited for by its id
        return cls._of(process.pid, orders_out, orders, news, news_in)

    @classmethod
    def _of(cls, pid: int, orders_out: int, orders: int, news: int, news_in: int) -> Self:
        os.close(orders_out)
        os.close(news_in)
        return cls(pid, orders, news)

    def close(self) -> None:
        """End the starter, unless an order has done so."""
        os.close(self.orders)
        os.close(self.news)
        os.waitpid(self.pid, 0)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _pipes() -> tuple[int, int, int, int]:
    return (*os.pipe2(os.O_CLOEXEC), *os.pipe2(os.O_CLOEXEC))


def _serve(orders: int, news: int) -> None:
    """Run the starter; does not return."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        importlib.import_module(_MODULE).serve(orders, news)
    finally:
        os._exit(1)
