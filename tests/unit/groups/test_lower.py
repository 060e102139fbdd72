import socket
import threading
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from remesh.foundation.errors import PeerError
from remesh.groups.gloo_sockets import gloo_loops, look_around
from remesh.groups.lower import LowerHalf


@pytest.mark.procs  # it may wait a moment for a loop of gloo
def test_a_member_lost_before_the_groups_are_made_is_not_forgotten() -> None:
    """The news of a death may come between the decision for a mesh and the making of its groups."""
    lower = LowerHalf("gloo", "cpu", 60.0)
    lower.sever()
    with pytest.raises(PeerError, match="lost meanwhile"):
        lower.grow(dist.HashStore(), 0, {"dp": 1})
    assert not dist.is_initialized()
    lower.shed()
    lower.grow(dist.HashStore(), 0, {"dp": 1})
    assert lower.mesh is not None
    assert lower.mesh.shape == (1,)
    lower.shed()
    assert not dist.is_initialized()


class Meanwhile(LowerHalf):
    """Another thread of the program opens sockets while the groups are made."""

    def __init__(self) -> None:
        super().__init__("gloo", "cpu", 60.0)
        self.near, self.far = socket.socketpair()
        self.opened = [self.near, self.far]

    def _make_groups(self, backend: str, axes: Mapping[str, int]) -> None:
        def open_some() -> None:
            self.near, self.far = socket.socketpair()
            with socket.create_server(("127.0.0.1", 0)) as server:
                client = socket.create_connection(server.getsockname())
                self.opened += [self.near, self.far, client, server.accept()[0]]

        thread = threading.Thread(target=open_some)
        thread.start()
        super()._make_groups(backend, axes)
        thread.join()


@pytest.mark.procs  # it may wait a moment for a loop of gloo
def test_sockets_that_another_thread_opened_while_groups_were_made_are_left_alone() -> None:
    lower = Meanwhile()
    lower.grow(dist.HashStore(), 0, {"dp": 1})
    lower.sever()
    _, _, near, far, client, accepted = lower.opened
    near.sendall(b"still")
    client.sendall(b"here")
    assert far.recv(9) + accepted.recv(9) == b"stillhere"
    lower.shed()
    for one in lower.opened:
        one.close()


class NotYetMade(Meanwhile):
    """A member is lost while this one still waits for others, before gloo has opened anything."""

    def _see_one_backend(self, store: dist.Store, rank: int) -> None:
        self.early = socket.socketpair()
        self.opened += self.early
        self.sever()
        super()._see_one_backend(store, rank)


@pytest.mark.procs  # it may wait a moment for a loop of gloo
def test_sockets_that_were_opened_before_gloos_own_are_left_alone() -> None:
    lower = NotYetMade()
    with pytest.raises((PeerError, RuntimeError)):
        lower.grow(dist.HashStore(), 0, {"dp": 1})
    near, far = lower.early
    near.sendall(b"here")
    assert far.recv(4) == b"here"
    lower.shed()
    for one in lower.opened:
        one.close()


@pytest.mark.procs
def test_groups_that_were_dropped_end_aside_and_are_gone_for_good() -> None:
    lower = LowerHalf("gloo", "cpu", 60.0)
    loops, before = gloo_loops(), look_around()
    for _ in range(3):
        lower.grow(dist.HashStore(), 0, {"dp": 1})
        lower.shed()
    for thread in threading.enumerate():
        if thread.name == "remesh-shed":
            thread.join()
    assert gloo_loops() <= loops and look_around().sockets <= before.sockets
