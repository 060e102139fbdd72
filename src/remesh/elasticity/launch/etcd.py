"""Rendezvous on etcd: torch's rendezvous state and a c10d store, kept under etcd's version 3 interface.

etcd outlives every node of the job, so no node's death takes the meeting place along. torch's own etcd backends speak
version 2, which etcd 3.6 no longer has, and need a package that is no longer kept; this one speaks JSON to the gateway
that every etcd since 3.3 has, with the standard library alone. Values are bytes; a compare-and-set is one transaction
on the key's modification number.

A server may be slow, restart, or choose another leader: a request that was not answered is made again, within a bound.
It may have been carried out, so every request is one that may be made twice.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from remesh.foundation.settings import timeout_s

DEFAULT_PORT = 2379
REQUEST_TIMEOUT_S = timeout_s(10.0)
ETCD_TIMEOUT_S = timeout_s(60.0)
"""How long a server may leave all requests without an answer."""
ETCD_POLL_S = 0.02
MAX_VALUE_BYTES = 1 << 20
"""A larger value is not of a rendezvous: states of 16,384 nodes are smaller."""


class _UnavailableError(http.client.HTTPException):
    """The server answers that it is not available now."""


class EtcdClient:
    """Single requests to one etcd server; threads take turns. Every failure is a RendezvousConnectionError."""

    def __init__(self, host: str, port: int, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._has_answered = False
        self._silent_since_s: float | None = None
        """When the first request failed that no answer came after."""

    def get(self, key: str) -> tuple[bytes, int] | None:
        """Value and modification number of a key; None when it is not there."""
        return _first(self._call("/v3/kv/range", {"key": _encode(key)}))

    def put(self, key: str, value: bytes) -> None:
        self._call("/v3/kv/put", {"key": _encode(key), "value": _encode(value)})

    def put_if(self, key: str, value: bytes, modified: int) -> tuple[bytes, int, bool] | None:
        """Write if the key's modification number is ``modified`` (0: not there); what is there after, and whether ours.

        None when it was not written and nothing is there.
        """
        answer = self._call(
            "/v3/kv/txn",
            {
                "compare": [{"key": _encode(key), "target": "MOD", "result": "EQUAL", "modRevision": str(modified)}],
                "success": [{"requestPut": {"key": _encode(key), "value": _encode(value)}}],
                "failure": [{"requestRange": {"key": _encode(key)}}],
            },
        )
        if answer.get("succeeded"):
            return value, int(answer["header"]["revision"]), True
        found = _first(answer["responses"][0].get("response_range", {}))
        return None if found is None else (*found, False)

    def put_once(self, key: str, value: bytes, modified: int, claim: str) -> bool:
        """As `put_if`, for a value that does not show its writer: the key ``claim`` does. Whether it was written."""
        answer = self._call(
            "/v3/kv/txn",
            {
                "compare": [{"key": _encode(key), "target": "MOD", "result": "EQUAL", "modRevision": str(modified)}],
                "success": [
                    {"requestPut": {"key": _encode(key), "value": _encode(value)}},
                    {"requestPut": {"key": _encode(claim), "value": ""}},
                ],
                "failure": [{"requestRange": {"key": _encode(claim)}}],
            },
        )
        return bool(answer.get("succeeded")) or _first(answer["responses"][0].get("response_range", {})) is not None

    def delete(self, key: str) -> bool:
        """Whether it was there; no longer, if the request had to be made twice."""
        return int(self._call("/v3/kv/deleterange", {"key": _encode(key)}).get("deleted", 0)) > 0

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            while True:
                try:
                    answer = self._ask(path, json.dumps(body).encode())
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self._drop()
                    now_s = time.monotonic()
                    if self._silent_since_s is None:
                        self._silent_since_s = now_s
                    if now_s - self._silent_since_s > ETCD_TIMEOUT_S or not self._may_come(error):
                        raise RendezvousConnectionError(
                            f"asking etcd at {self._host}:{self._port}: {type(error).__name__}: {error}"
                        ) from None
                else:
                    self._has_answered, self._silent_since_s = True, None
                    return answer
                time.sleep(ETCD_POLL_S)

    def _may_come(self, error: Exception) -> bool:
        """Whether an answer may still come. Where none has been yet, only of a server that is there, and takes long."""
        if isinstance(error, ValueError):
            return False
        return self._has_answered or isinstance(error, TimeoutError | _UnavailableError)

    def _ask(self, path: str, body: bytes) -> dict[str, Any]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read(2 * MAX_VALUE_BYTES)
        if response.status != http.client.OK:
            kind = _UnavailableError if response.status >= http.client.INTERNAL_SERVER_ERROR else ValueError
            raise kind(f"status {response.status}, {data[:200]!r}")
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError(f"expected a JSON object, found {data[:80]!r}")
        return answer

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class EtcdBackend(RendezvousBackend):
    """Keeps the rendezvous state of one job."""

    def __init__(self, client: EtcdClient, run_id: str) -> None:
        self._client = client
        self._key = f"/remesh/{run_id}/rendezvous"

    @property
    def name(self) -> str:
        return "etcd"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._client.get(self._key)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        return self._client.put_if(self._key, state, int(token or 0))


class EtcdStore(dist.Store):
    """A c10d store on etcd: what agents need of one to assign ranks and to end together."""

    def __init__(self, client: EtcdClient, prefix: str, timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._wait_timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._client.put(self._prefix + key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        self._wait([key], self._wait_timeout)
        found = self._client.get(self._prefix + key)
        return found[0] if found else b""

    def add(self, key: str, num: int) -> int:
        claim = f"{self._prefix}claims/{uuid.uuid4().hex}"
        while True:
            found = self._client.get(self._prefix + key)
            value = int(found[0]) + num if found else num
            if self._client.put_once(self._prefix + key, str(value).encode(), found[1] if found else 0, claim):
                return value

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._client.get(self._prefix + key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Compare and set as a TCPStore does: an empty ``expected`` creates a missing key; returns the new value."""
        found = self._client.get(self._prefix + key)
        present = found[0] if found else b""
        if present != expected.encode():
            return present
        written = self._client.put_if(self._prefix + key, desired.encode(), found[1] if found else 0)
        return written[0] if written else b""

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._prefix + key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout or self._wait_timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        self._wait_timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait for a key."""
        return self._wait_timeout

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self._wait_timeout = timeout

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise LookupError(
                    f"waiting for keys {list(keys)} on etcd: not there after {timeout.total_seconds():g} s"
                )
            time.sleep(ETCD_POLL_S)


def connect_etcd(parameters: RendezvousParameters) -> tuple[EtcdBackend, EtcdStore]:
    """Backend and store of one job on the etcd server that ``--rdzv-endpoint`` names."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    client = EtcdClient(host, port)
    client.get("/remesh")  # so that a server that is not there is known now
    return EtcdBackend(client, parameters.run_id), EtcdStore(client, f"/remesh/{parameters.run_id}/store/")


def _encode(value: str | bytes) -> str:
    return base64.b64encode(_as_bytes(value)).decode()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _first(answer: dict[str, Any]) -> tuple[bytes, int] | None:
    found = answer.get("kvs")
    if not found:
        return None
    return base64.b64decode(found[0].get("value", "")), int(found[0]["mod_revision"])
