"""Agents' own stores: where they listen, that strangers do no harm, and that requests to a silent host end."""

import random
import socket
import threading
import time

import pytest
import torch.distributed as dist

from remesh.elasticity.store.store_servers import StoreClient, StoreServer, StoreWatch, bind_endpoint
from remesh.wire.listening import is_listening


def test_garbage_does_not_disturb_a_store() -> None:
    server = StoreServer(socket.create_server(("127.0.0.1", 0)))
    server.store.set("key", "value")
    chance = random.Random(5)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(chance.choice([b"", b"GET / HTTP/1.1\r\n\r\n"]) + chance.randbytes(chance.randrange(500)))
    with StoreWatch() as watch:
        client = StoreClient(f"127.0.0.1:{server.port}", watch, connect_s=10.0, limit_s=10.0)
        assert client.store.get("key") == b"value"
    for one in silent:
        one.close()


def test_request_to_a_host_that_says_nothing_ends() -> None:
    """The port takes connections and nobody answers, as when its process is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as mute, StoreWatch() as watch:
        port = mute.getsockname()[1]
        begun_s = time.monotonic()
        with pytest.raises(RuntimeError):
            StoreClient(f"127.0.0.1:{port}", watch, connect_s=0.5, limit_s=0.5)
        # Not a matter of speed: by itself it would wait for ever.
        assert time.monotonic() - begun_s < 60


def test_request_that_takes_too_long_is_cut_and_others_are_not() -> None:
    server = StoreServer(socket.create_server(("127.0.0.1", 0)))
    with StoreWatch() as watch:
        slow, other = (StoreClient(f"127.0.0.1:{server.port}", watch, connect_s=60.0, limit_s=0.3) for _ in range(2))
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                with slow.guard():
                    slow.store.get("a key that nobody sets")
            except dist.DistError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(100)
        assert errors
        assert other.store.add("count", 1) == 1


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1")])
def test_store_at_a_loopback_endpoint_listens_there_only(host: str, address: str) -> None:
    if ":" in host and not has_ipv6_loopback():
        pytest.skip("this machine has no ::1")
    with bind_endpoint(host, 0) as listener:
        assert listener.getsockname()[0] == address
        port = listener.getsockname()[1]
        assert is_listening(address, port)
    assert is_listening(address, port) is False
