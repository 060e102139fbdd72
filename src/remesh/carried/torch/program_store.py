"""Client of the job's store in a program: a `Store` of torch whose connections can be dropped at a cut."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistStoreError, Store

from remesh.carried.torch.gate import Gate
from remesh.foundation.errors import PeerError
from remesh.wire.messages import Line, Message
from remesh.wire.token import Token

_REQUEST_POLL_S: Final = 0.05
"""The longest time that a request of the program waits in the server before the gate is checked again."""
_DEFAULT_TIMEOUT: Final = timedelta(minutes=30)


class StoreLink:
    """Connections to the job's store, one for each thread that asks at the same time."""

    def __init__(self, gate: Gate, address: tuple[str, int], token: Token) -> None:
        self._gate = gate
        self._address, self._token = address, token
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self.stores: list[CarriedStore] = []
        """Kept alive here: torch holds only the C++ side of a store, which does nothing without its Python side."""

    def move(self, address: tuple[str, int]) -> None:
        """Use the store at another address from now on."""
        self._address = address

    def ask(self, message: Message) -> Any:
        """The store's answer, once the gate is open."""
        self._gate.begin_passing()
        try:
            return self.ask_now(message)
        finally:
            self._gate.end_passing()

    def ask_now(self, message: Message) -> Any:
        """The store's answer, whether the gate is open or not: for the control thread."""
        with self._lock:
            line = self._idle.pop() if self._idle else None
        if line is None:
            line = Line.connect([self._address], self._token, "asking the store of the job")
        line.send(message)
        answer = line.receive()
        if answer is None:
            raise PeerError("asking the store of the job: the connection was closed; the leader of the job has ended")
        with self._lock:
            self._idle.append(line)
        if answer.get("refused"):
            raise DistStoreError(f"asking the store of the job: {answer['refused']}")
        return answer["value"]

    def descriptors(self) -> list[int]:
        """The descriptors of all connections that no thread uses now."""
        with self._lock:
            return [line.fileno() for line in self._idle]

    def drop(self) -> None:
        """Close all connections; the next request opens a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()


class CarriedStore(Store):
    """The job's store, as a ``Store`` of torch."""

    def __init__(self, link: StoreLink, prefix: str = "", *, of_control: bool = False) -> None:
        """With ``of_control`` the store is for the control thread, which passes a closed gate."""
        super().__init__()
        self._prefix = prefix
        self._link = link
        self._ask = link.ask_now if of_control else link.ask
        self._turn_s = math.inf if of_control else _REQUEST_POLL_S
        self.set_timeout(_DEFAULT_TIMEOUT)
        link.stores.append(self)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> CarriedStore:
        return CarriedStore(self._link, self._prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask({"type": "set", "keys": self._keys(keys), "values": [_text(value) for value in values]})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [value.encode("latin-1") for value in self._get(keys, self._timeout())]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._get(keys, self._timeout() if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"type": "add", "key": self._prefix + key, "amount": amount}))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask({"type": "append", "key": self._prefix + key, "value": _text(value)})

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask({"type": "check", "keys": self._keys(keys)}))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        texts = {"expected": _text(expected), "desired": _text(desired)}
        return str(self._ask({"type": "compare_set", "key": self._prefix + key, **texts})).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask({"type": "delete", "key": self._prefix + key}))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        found = self._ask({"type": "list", "prefix": self._prefix})
        return [key.removeprefix(self._prefix) for key in found]

    # What torch's C++ side calls these, which a `PrefixStore` over this one asks.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _timeout(self) -> timedelta:
        # torch's C++ side keeps it: a `PrefixStore` over this one sets it there.
        kept: timedelta = self.timeout  # type: ignore[attr-defined]  # stubs lack this one
        return kept

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _get(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        until_s = time.monotonic() + timeout.total_seconds()
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            values = self._ask({"type": "get", "keys": self._keys(keys), "wait_s": min(left_s, self._turn_s)})
            if values is not None:
                return list(values)
            if not left_s:
                raise DistStoreError(f"waiting for {list(keys)} in the store: not all are there after {timeout}")


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")
