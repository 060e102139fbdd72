"""The store over TLS: agents with certificates of the job's authority reach it, others do no harm and are told of."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from remesh.elasticity.store import tunnel
from remesh.elasticity.store.store_servers import StoreClient, StoreServer, StoreWatch
from remesh.elasticity.store.tunnel import MAX_HANDSHAKES, Refusal, Tunnels
from remesh.wire.listening import is_listening
from remesh.wire.tls import Tls
from tests.support.certificates import make_tls, sign_again

pytestmark = pytest.mark.procs  # openssl makes the certificates

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls") / "ours")


@dataclass
class Served:
    """A store behind a door."""

    tunnels: Tunnels
    endpoint: str

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


@contextlib.contextmanager
def serve(tls: Tls) -> Iterator[Served]:
    store = StoreServer(socket.create_server(("127.0.0.1", 0)))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Tunnels(tls) as tunnels:
        tunnels.open_port(listener, store.port)
        yield Served(tunnels, f"127.0.0.1:{port}")


def ask(endpoint: str, tls: Tls, key: str = "key") -> int:
    """Count through a way of one's own."""
    with Tunnels(tls) as tunnels, StoreWatch() as watch:
        client = StoreClient(endpoint, watch, connect_s=TIMEOUT_S, limit_s=TIMEOUT_S, way=tunnels.way_to(endpoint))
        return int(client.store.add(key, 1))


def refusal_of(endpoint: str, tls: Tls, about: str) -> Refusal:
    """What a caller is told who does not get in."""
    with Tunnels(tls) as tunnels, StoreWatch() as watch:
        while True:  # a busy machine may not have come to an answer when the first try is over
            with pytest.raises(RuntimeError):
                StoreClient(endpoint, watch, connect_s=0.5, limit_s=0.5, way=tunnels.way_to(endpoint))
            if told := [note for note in tunnels.take_notes() if about in note.reason]:
                return told[0]


def note_of(tunnels: Tunnels, about: str) -> Refusal:
    """The first note with that reason. A handshake that a caller broke off has one of its own."""
    while not (told := [note for note in tunnels.take_notes() if about in note.reason]):
        time.sleep(0.01)
    return told[0]


def test_store_is_reached_through_a_way_and_its_port_shows_no_plain_byte(ours: Tls) -> None:
    with serve(ours) as served:
        assert ask(served.endpoint, ours) == 1
        assert ask(served.endpoint, ours) == 2
        # A client without TLS, as every torch store is, gets nothing.
        with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as plain:
            plain.sendall(b"\0" * 64)
            with contextlib.suppress(ConnectionResetError):
                assert len(plain.recv(1 << 10)) < 16
        assert "letting 127.0.0.1 in" in note_of(served.tunnels, "").doing
        assert is_listening("127.0.0.1", served.port) is True
        assert ask(served.endpoint, ours) == 3
        assert not served.tunnels.take_notes()


def test_large_values_and_many_at_once_pass_whole(ours: Tls) -> None:
    value = random.Random(3).randbytes(3 << 20)
    with serve(ours) as served, Tunnels(ours) as tunnels, StoreWatch() as watch:
        way = tunnels.way_to(served.endpoint)
        clients = [
            StoreClient(served.endpoint, watch, connect_s=TIMEOUT_S, limit_s=TIMEOUT_S, way=way) for _ in range(4)
        ]

        def put(number: int) -> None:
            clients[number].store.set(f"{number}", value)

        threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert all(clients[0].store.get(f"{number}") == value for number in range(4))


def test_what_was_said_last_arrives_although_its_sender_is_gone(ours: Tls) -> None:
    """Setting a key has no answer: the sender closes at once."""
    with serve(ours) as served, Tunnels(ours) as tunnels, StoreWatch() as watch:
        way = tunnels.way_to(served.endpoint)
        leaving = StoreClient(served.endpoint, watch, connect_s=TIMEOUT_S, limit_s=TIMEOUT_S, way=way)
        leaving.store.set("last", b"x" * (1 << 20))
        del leaving
        other = StoreClient(served.endpoint, watch, connect_s=TIMEOUT_S, limit_s=TIMEOUT_S, way=way)
        other.store.wait(["last"])
        assert len(other.store.get("last")) == 1 << 20


def test_door_of_another_authority_is_not_believed(ours: Tls, tmp_path: Path) -> None:
    with serve(make_tls(tmp_path / "others")) as served:
        assert "reaching the store" in refusal_of(served.endpoint, ours, "verify failed").doing


def test_caller_whose_certificate_is_not_the_authoritys_is_refused_and_both_are_told(ours: Tls, tmp_path: Path) -> None:
    other = make_tls(tmp_path / "others")
    with serve(ours) as served:
        refusal_of(served.endpoint, replace(other, authority=ours.authority), "may have refused this certificate")
        note_of(served.tunnels, "verify failed")
        assert ask(served.endpoint, ours) == 1


def test_expired_certificate_is_refused_and_told(ours: Tls) -> None:
    folder = Path(ours.certificate).parent
    expired = replace(ours, certificate=sign_again(folder, -1, "expired.pem"))
    with serve(ours) as served:
        refusal_of(served.endpoint, expired, "may have refused")
        note_of(served.tunnels, "expired")
    with serve(expired) as served:
        refusal_of(served.endpoint, ours, "expired")


def test_who_calls_as_the_tunnels_end_is_let_go(ours: Tls) -> None:
    for number in range(30):
        with Tunnels(ours) as tunnels:
            listener = socket.create_server(("127.0.0.1", 0))
            tunnels.open_port(listener, 1)
            callers = [socket.create_connection(listener.getsockname(), TIMEOUT_S) for _ in range(number % 4)]
        gc.collect()  # an open socket that nobody holds is a warning, and the test fails
        for caller in callers:
            caller.settimeout(TIMEOUT_S)
            with caller, contextlib.suppress(ConnectionError):
                assert caller.recv(1) == b""


def test_callers_who_never_shake_hands_do_not_keep_others_out_for_long(
    ours: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "HANDSHAKE_TIMEOUT_S", 1.0)  # in which the others must have theirs
    with serve(ours) as served, contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_HANDSHAKES):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S))
        assert ask(served.endpoint, ours) == 1


def test_a_host_that_is_gone_shows_as_without_encryption(ours: Tls) -> None:
    with Tunnels(ours) as tunnels, StoreWatch() as watch:
        with serve(ours) as served:
            way = tunnels.way_to(served.endpoint)
            client = StoreClient(served.endpoint, watch, connect_s=TIMEOUT_S, limit_s=TIMEOUT_S, way=way)
            assert client.store.add("key", 1) == 1
        assert is_listening("127.0.0.1", served.port) is False
        with pytest.raises(RuntimeError):
            client.store.add("key", 1)
