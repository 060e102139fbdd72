"""Connection to a store that another thread can cut, which wakes a thread that waits on it for a key.

A client of torch's store waits for a key in C++ until its timeout, and nothing in its interface ends that. While it
connects it waits for ever, if the host takes the connection and sends nothing. Its socket is the one to the store's
port that appeared while it connected.

torch asks the resolver for the name of the address, five seconds where a packet of that is lost: one attempt proves
nothing. A host that is slow for a moment is tried again, until it refuses connections, which proves that the store is
gone, or until the caller has lost interest:

    try, cut after TRY_TIMEOUT_S ──> answered: done
                             refused, or is_over(): raise
                             patience_s over: raise
                             else try again
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from remesh.elasticity.store.endpoint import split_endpoint
from remesh.foundation.errors import PeerError
from remesh.foundation.settings import timeout_s
from remesh.foundation.threads import make_thread
from remesh.groups.gloo_sockets import Socket, cut_connections, open_sockets
from remesh.wire.listening import is_listening

TRY_TIMEOUT_S = timeout_s(5.0)
"""How long one attempt to connect may take. A connection whose first packet was lost comes about no sooner by waiting:
its kernel doubles its pauses."""
_POLL_S = 0.05


class StoreLine:
    """One client of the store at ``endpoint``, ``host:port``; raises what torch raises when no store answers there.

    ``patience_s`` bounds all attempts together; `PeerError` once ``is_over``, which another thread calls, is true.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        patience_s: float,
        timeout_s: float,
        is_over: Callable[[], bool] = lambda: False,
        try_s: float = TRY_TIMEOUT_S,
    ) -> None:
        host, self._port = split_endpoint(endpoint)
        self.endpoint = endpoint
        deadline_s = time.monotonic() + patience_s
        limit = timedelta(seconds=min(try_s, patience_s))
        was_cut, error = True, None
        while was_cut or error is not None:
            before, error = open_sockets(), None
            with self._cut_from(before, try_s, is_over) as was_cut_here:
                try:
                    self.store = dist.TCPStore(host, self._port, is_master=False, timeout=limit)
                except dist.DistError as failed:
                    error = failed
            # It may have been cut when it had just been made.
            was_cut = was_cut_here.is_set()
            if is_over():
                raise PeerError(
                    f"connecting to the store at {endpoint}: the generation that needs it was left meanwhile; all "
                    "workers join a new one"
                ) from error
            if error is not None and (time.monotonic() >= deadline_s or is_listening(host, self._port) is False):
                raise error
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self._sockets = self._new_since(before)
        self.is_cut = False
        """Whether it is of no more use."""

    def cut(self) -> None:
        """End every wait on it with an error, now and from now on. From any thread."""
        self.is_cut = True
        cut_connections(self._sockets)

    def _new_since(self, before: frozenset[Socket]) -> frozenset[Socket]:
        return frozenset(one for one in open_sockets() - before if _port_behind(one) == self._port)

    @contextlib.contextmanager
    def _cut_from(
        self, before: frozenset[Socket], try_s: float, is_over: Callable[[], bool]
    ) -> Iterator[threading.Event]:
        """Cut what connects inside once that takes too long, or is over; again and again, for torch's client retries.

        The event that comes back is set, at the end, if anything was cut. Time is counted in looks: a process that
        was stopped has not waited.
        """
        is_done, was_cut = threading.Event(), threading.Event()

        def watch() -> None:
            num_looks = 0
            while not is_done.wait(_POLL_S):
                num_looks += 1
                if (num_looks * _POLL_S > try_s or is_over()) and (found := self._new_since(before)):
                    was_cut.set()
                    cut_connections(found)

        watching = make_thread("store-line", watch, daemon=True)
        watching.start()
        try:
            yield was_cut
        finally:
            is_done.set()
            watching.join()


def _port_behind(one: Socket) -> int | None:
    """The port that a socket is connected to; None for other kinds of sockets."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one[0])) as alias:
        if alias.family in (socket.AF_INET, socket.AF_INET6):
            return int(alias.getpeername()[1])
    return None
