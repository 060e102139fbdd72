"""Store servers, run by agents, and the clients of agents and workers.

An agent's own store listens where the agent does, or at the endpoint that names its machine. The sockets of a client
are known, so that a watcher can end a request to a host that has fallen silent: the store's own client waits for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from remesh.elasticity.store.endpoint import is_loopback, split_endpoint
from remesh.foundation.settings import timeout_s
from remesh.foundation.threads import make_thread
from remesh.foundation.torch_private import matches_machine_hostname

STORE_SILENCE_TIMEOUT_S = timeout_s(5.0)
"""A request that takes longer was made to a host that is gone, or stopped: as long as heartbeats may be missing."""
_WATCH_POLL_S = 0.25


class StoreServer:
    """A store that this process serves, on a socket that it has bound."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        bound = listener.getsockname()[0]
        self._address = "127.0.0.1" if bound in ("0.0.0.0", "::") else bound
        self.store = dist.TCPStore(
            self._address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )


def bind_endpoint(host: str, port: int) -> socket.socket:
    """A socket that listens at an endpoint which names this machine: on loopback if it does, else on all interfaces.

    OSError when the port is taken.
    """
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(("127.0.0.1" if host == "localhost" else host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def names_this_machine(host: str) -> bool:
    """Whether an endpoint's host is this machine, by torch's rule."""
    return bool(matches_machine_hostname(host))


@dataclass(slots=True)
class _WatchedRequest:
    """A request that is under way."""

    num_looks_left: int
    cut: Callable[[], None]


class StoreWatch:
    """Ends requests that take too long. A context manager around the agent's life.

    Time is counted in looks: a process that was stopped, or got no processor, has not waited for an answer.
    """

    def __init__(self) -> None:
        self._pending: dict[int, _WatchedRequest] = {}
        self._numbers = itertools.count()
        self._ended = threading.Event()

    def __enter__(self) -> StoreWatch:
        make_thread("store-watch", self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def over(self, limit_s: float, cut: Callable[[], None]) -> Iterator[None]:
        """Call ``cut`` from another thread if what is done inside takes longer than ``limit_s``."""
        number = next(self._numbers)
        self._pending[number] = _WatchedRequest(math.ceil(limit_s / _WATCH_POLL_S), cut)
        try:
            yield
        finally:
            del self._pending[number]

    def look(self) -> None:
        """End what has been looked at often enough; done regularly by a thread."""
        for request in list(self._pending.values()):
            if request.num_looks_left <= 0:
                request.cut()
            request.num_looks_left -= 1

    def _run(self) -> None:
        while not self._ended.wait(_WATCH_POLL_S):
            self.look()


class StoreClient:
    """A connection to a store whose requests end: answered, or with an error after ``limit_s``.

    ``way`` is where it is made, when that is not the store's endpoint itself.
    """

    def __init__(self, endpoint: str, watch: StoreWatch, *, connect_s: float, limit_s: float, way: str = "") -> None:
        self.endpoint = endpoint
        self._watch = watch
        self._limit_s = limit_s
        host, self._port = split_endpoint(way or endpoint)
        before = _connections_to(self._port)
        with watch.over(connect_s, lambda: _cut(_connections_to(self._port) - before)):
            # The store's own client tries a refused connection again and again, and waits for ever on a silent host.
            self.store: dist.Store = dist.TCPStore(
                host, self._port, is_master=False, timeout=timedelta(seconds=connect_s)
            )
        self._sockets = _connections_to(self._port) - before

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Around a request."""
        return self._watch.over(self._limit_s, lambda: _cut(self._sockets & _connections_to(self._port)))


def _cut(sockets: Collection[tuple[int, int]]) -> None:
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as alias:
            alias.shutdown(socket.SHUT_RDWR)


def _connections_to(port: int) -> frozenset[tuple[int, int]]:
    """(descriptor, inode) of this process's connections to a port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as alias:
                if alias.family in (socket.AF_INET, socket.AF_INET6) and _peer_port(alias.getpeername()) == port:
                    found.add((descriptor, os.fstat(descriptor).st_ino))
    return frozenset(found)


def _peer_port(name: Sequence[object]) -> object:
    return name[1]
