"""A connection to a store that another thread can cut, so that whoever waits on it for a key goes on.

A client of torch's store waits for a key in C++ until its timeout, and nothing in its interface ends that. Its socket
is the one to the store's port that appeared while it connected.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from remesh.comm.gloo_sockets import Socket, cut_connections, open_sockets


class StoreLine:
    """One client of the store at ``endpoint``, ``host:port``; raises what torch raises when nobody answers there."""

    def __init__(self, endpoint: str, *, connect_s: float, timeout_s: float) -> None:
        host, _, port = endpoint.rpartition(":")
        before = open_sockets()
        self.endpoint = endpoint
        self.store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=connect_s))
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self._sockets = frozenset(one for one in open_sockets() - before if _port_behind(one) == int(port))
        self.is_cut = False
        """Whether it is of no more use."""

    def cut(self) -> None:
        """End every wait on it with an error, now and from now on. From any thread."""
        self.is_cut = True
        cut_connections(self._sockets)


def _port_behind(one: Socket) -> int | None:
    """The port that a socket is connected to; None for other kinds of sockets."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one[0])) as alias:
        if alias.family in (socket.AF_INET, socket.AF_INET6):
            return int(alias.getpeername()[1])
    return None
