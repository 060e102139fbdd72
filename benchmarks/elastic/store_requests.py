"""Cost of encryption for a request to the store: through TLS tunnels, beside the same request in the clear.

Two processes, as two agents are: this one asks, the other one serves, each with its tunnels. Requests alternate: one in
the clear, one through TLS. Time is that of the request; processor time is that of both processes, with whatever their
tunnels do, over batches of one kind. An agent looks at the bell a hundred times a second, so processor time at the door
is what limits how many agents one store serves.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.report import Row
from remesh.elasticity.store.store_servers import StoreClient, StoreServer, StoreWatch
from remesh.elasticity.store.tunnel import Tunnels
from remesh.wire.tls import Tls
from tests.support.certificates import make_tls

PLAN_BYTES = 77_000
"""About what an agent reads of a plan for 1,024 workers."""
LOOKS_PER_S = 108
"""Requests of an agent of a quiet job, from the room's own count."""
TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of request, one way."""

    seconds: tuple[float, ...]
    """Of each request."""
    host_s: float
    """Processor time of the serving process for each."""
    guest_s: float
    """Of the asking one."""


def rows(num_requests: int) -> list[Row]:
    """A look at the bell and the reading of a plan, encrypted beside in the clear."""
    if shutil.which("openssl") is None:
        print("left out: requests through TLS, which need openssl for certificates")
        return []
    with tempfile.TemporaryDirectory() as folder:
        tls = make_tls(Path(folder) / "tls")
        look = _compare(tls, lambda store: store.add("bell", 0), num_requests)
        plan = _compare(tls, lambda store: store.get("plan"), max(50, num_requests // 10))
    found = []
    for about, (clear, coded) in (("a look at the bell", look), (f"reading {PLAN_BYTES // 1000} kB", plan)):
        mine, other = statistics.median(coded.seconds), statistics.median(clear.seconds)
        spread = statistics.quantiles(coded.seconds, n=10)[-1] / mine - 1
        about = f"store through TLS, {about}"
        found += [
            Row(f"{about}: time of a request over one in the clear", mine / other, "ratio", peer="in the clear"),
            Row(f"{about}: time of a request, p50", mine, "s", bound=other, spread=spread),
        ]
    clear, coded = look
    added_s = coded.host_s - clear.host_s
    return [
        *found,
        Row("store through TLS: a core of its host for each quiet agent, share", coded.host_s * LOOKS_PER_S, "ratio"),
        Row("store through TLS: of that what the door adds", added_s * LOOKS_PER_S, "ratio"),
        Row(
            "store through TLS: a core of an agent's own host, share",
            coded.guest_s * LOOKS_PER_S,
            "ratio",
            bound=clear.guest_s * LOOKS_PER_S,
        ),
    ]


def _compare(tls: Tls, ask: Callable[[dist.Store], object], num_requests: int) -> tuple[Cost, Cost]:
    """In the clear, and through a way and a door."""
    with _Host(tls) as host, Tunnels(tls) as tunnels, StoreWatch() as watch:
        ways = ["", tunnels.way_to(host.door)]
        clear, coded = (
            StoreClient(endpoint, watch, connect_s=TIMEOUT_S, limit_s=TIMEOUT_S, way=way).store
            for endpoint, way in zip((host.plain, host.door), ways, strict=True)
        )
        seconds: tuple[list[float], list[float]] = [], []
        for turn in range(num_requests + num_requests // 10):
            for store, times in zip((clear, coded), seconds, strict=True):
                begun_s = time.perf_counter()
                ask(store)
                if turn >= num_requests // 10:
                    times.append(time.perf_counter() - begun_s)
        return tuple(  # type: ignore[return-value]
            Cost(tuple(times), *_processor_time(host, lambda one=store: ask(one), num_requests))
            for store, times in zip((clear, coded), seconds, strict=True)
        )


def _processor_time(host: _Host, ask: Callable[[], object], num_requests: int) -> tuple[float, float]:
    """Of the host's process and of this one, for each request."""
    host_s, guest_s = host.ask_processor_time(), time.process_time()
    for _ in range(num_requests):
        ask()
    guest_s = time.process_time() - guest_s
    return (host.ask_processor_time() - host_s) / num_requests, guest_s / num_requests


class _Host:
    """The serving process. A context manager."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def __enter__(self) -> _Host:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.elastic.store_requests", *self._tls.to_message()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.plain, self.door = json.loads(self._say(""))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask_processor_time(self) -> float:
        return float(self._say("time\n"))

    def _say(self, text: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()
        return self._process.stdout.readline()


def serve(tls: Tls) -> None:
    """Serve a store in the clear and behind a door, until standard input ends; tell processor time when asked."""
    server = StoreServer(socket.create_server(("127.0.0.1", 0)))
    server.store.set("plan", b"x" * PLAN_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Tunnels(tls) as tunnels:
        tunnels.open_port(listener, server.port)
        print(json.dumps([f"127.0.0.1:{server.port}", f"127.0.0.1:{port}"]), flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)


if __name__ == "__main__":
    serve(Tls(*sys.argv[1:]))
