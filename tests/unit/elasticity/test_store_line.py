"""A worker's connection to the store: a slow host is waited for, one that is gone is not, and a break ends the wait."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from remesh.elasticity.store.store_line import StoreLine
from remesh.elasticity.store.store_servers import StoreServer
from remesh.foundation.errors import PeerError
from remesh.wire.free_ports import free_port

TRY_S = 0.5


@contextlib.contextmanager
def full_host() -> Iterator[socket.socket]:
    """A listener that takes nobody, and whose queue is full: the kernel drops who comes, as on a host that is slow."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield listener


def test_a_host_that_is_slow_for_longer_than_an_attempt_is_waited_for() -> None:
    """A job of healthy members was broken, and met again, since one worker's first connection took five seconds."""
    served: list[StoreServer] = []
    looks = iter(range(1000))
    with full_host() as listener:

        def look() -> bool:
            if next(looks) == 12:  # in the second attempt
                served.append(StoreServer(listener))
            return False

        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        line = StoreLine(endpoint, patience_s=300.0, timeout_s=60.0, is_over=look, try_s=TRY_S)
        line.store.set("key", "value")
        # The server's own client is in this process, and may have been cut with an attempt.
        assert served and line.store.get("key") == b"value"


@pytest.mark.parametrize("is_full", [True, False])
def test_a_break_ends_the_wait_for_a_host_that_says_nothing(is_full: bool) -> None:
    """It takes the connection and nobody answers, as when its process is stopped: torch's client waits for ever."""
    with full_host() if is_full else socket.create_server(("127.0.0.1", 0)) as mute:
        looks = iter(range(1000))
        with pytest.raises(PeerError, match="was left meanwhile"):
            StoreLine(
                f"127.0.0.1:{mute.getsockname()[1]}",
                patience_s=300.0,
                timeout_s=60.0,
                is_over=lambda: next(looks) > 14,
                try_s=TRY_S,
            )


def test_a_host_that_says_nothing_is_given_up_in_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(dist.DistError):
        StoreLine(f"127.0.0.1:{mute.getsockname()[1]}", patience_s=2 * TRY_S, timeout_s=60.0, try_s=TRY_S)


def test_a_port_that_refuses_is_given_up_after_one_attempt() -> None:
    with pytest.raises(dist.DistError):
        StoreLine(f"127.0.0.1:{free_port()}", patience_s=1e6, timeout_s=60.0, try_s=TRY_S)
