"""A real etcd for benchmarks and tests, where one is installed (Debian: ``etcd-server``)."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from remesh.wire.free_ports import free_port

_START_S = 30.0


def why_no_etcd() -> str | None:
    """What is missing for an etcd of our own; None if nothing is."""
    return None if shutil.which("etcd") else "needs etcd (Debian: etcd-server), which is not on the path"


@contextlib.contextmanager
def etcd_server(folder: Path, *flags: str) -> Iterator[int]:
    """A real etcd on a free port of loopback; gives the port."""
    client, peer = free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [
        *("etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", f"default={peer_url}", "--logger", "zap", "--log-level", "error", *flags),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", client), 0.2):
                break
            if time.monotonic() > deadline_s or server.poll() is not None:
                raise RuntimeError(f"starting {' '.join(command)}: nobody listens on port {client}")
            time.sleep(0.05)
        yield client
    finally:
        server.kill()
        server.wait()
