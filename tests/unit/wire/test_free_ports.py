"""Ports for servers that start in a moment."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from remesh.foundation.errors import ConfigError
from remesh.wire import free_ports
from remesh.wire.free_ports import free_port


def _ports_of_clients(num: int) -> set[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=num) as server:
        clients = [socket.create_connection(server.getsockname()) for _ in range(num)]
        ports = {client.getsockname()[1] for client in clients}
        for client in clients:
            client.close()
    return ports


def test_no_client_gets_a_port_that_a_server_was_promised() -> None:
    if not free_ports.server_ports():
        pytest.skip("this machine gives nearly all of its ports to clients")
    promised = {free_port() for _ in range(500)}
    assert len(promised) > 450
    assert max(promised) < min(_ports_of_clients(500))


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(free_ports, "server_ports", lambda: range(taken, taken + 1))
        with pytest.raises(ConfigError, match=rf"{taken} to {taken} are in use"):
            free_port()


@pytest.mark.parametrize("text", ["1024\t65000\n", None])
def test_a_machine_without_such_ports_gives_any(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "range"
    if text is not None:
        told.write_text(text)
    monkeypatch.setattr(free_ports, "_CLIENTS", told)
    assert not free_ports.server_ports()
    socket.create_server(("127.0.0.1", free_port())).close()
