"""Key-value store of a job, in the leader, which outlives the ranks' programs.

torch's own store would have a server in rank 0, with kinds of descriptors that no image holds, and its content would be
lost at a restart. Here it is a table, part of every checkpoint. A caller asks one thing at a time and gets one answer;
one that waits for keys gets it when they are there, or without them after the time that it named.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from remesh.foundation.threads import make_thread
from remesh.wire.messages import Message
from remesh.wire.server import Peer, Server
from remesh.wire.token import Token

_POLL_S: Final = 1.0
_SHOWN_CHARS: Final = 40
"""The most that an error shows of a value."""


@dataclass(eq=False, slots=True)
class _Waiter:
    caller: Peer
    keys: tuple[str, ...]
    until_s: float
    lacks: str = ""
    """One of its keys that is not there; a write of any other key need not look at this waiter."""


class ProgramStore:
    """The store of one job, served by a thread; a context manager."""

    def __init__(self, token: Token, listener: socket.socket, content: Mapping[str, str], log: Callable[[str], None]):
        """``content`` has values as text, one character for each byte."""
        self._table = dict(content)
        self._lock = threading.Lock()
        self._waiters: dict[_Waiter, None] = {}
        """In the order in which they came."""
        self._lacking: dict[str, list[_Waiter]] = {}
        """The same waiters, by the key that each lacks."""
        self._server = Server(token, self._on_message, self._on_gone, log)
        self._server.listen(listener)
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._server.watch(self._wake_out)
        self._is_over = False
        self._thread = make_thread("store", self._serve, daemon=True)

    def __enter__(self) -> ProgramStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        os.write(self._wake_in, b"!")
        self._thread.join()
        for descriptor in (self._wake_out, self._wake_in):
            os.close(descriptor)

    def content(self) -> dict[str, str]:
        """What the store holds now."""
        with self._lock:
            return dict(self._table)

    def forget(self, prefix: str) -> None:
        """Drop the keys that begin with a prefix."""
        with self._lock:
            self._table = {key: value for key, value in self._table.items() if not key.startswith(prefix)}

    def _serve(self) -> None:
        while not self._is_over:
            due_s = min((waiter.until_s for waiter in self._waiters), default=time.monotonic() + _POLL_S)
            self._server.poll(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            for waiter in [each for each in self._waiters if each.until_s <= now_s]:
                self._forget(waiter)
                self._answer(waiter.caller, None)
        self._server.forget(self._wake_out)
        self._server.close()

    def _on_gone(self, caller: Peer) -> None:
        for waiter in [each for each in self._waiters if each.caller is caller]:
            self._forget(waiter)

    def _on_message(self, caller: Peer, message: Message) -> None:
        if message["type"] == "get":
            until_s = time.monotonic() + float(message["wait_s"])
            self._look(_Waiter(caller, tuple(map(str, message["keys"])), until_s))
            return
        try:
            with self._lock:
                value = _ACTS[message["type"]](self._table, message)
        except ValueError as error:
            self._answer(caller, None, refused=str(error))
            return
        self._answer(caller, value)
        for key in message.get("keys", [message.get("key")]):
            for waiter in list(self._lacking.get(key, ())):
                self._forget(waiter)
                self._look(waiter)

    def _look(self, waiter: _Waiter) -> None:
        """Answer a waiting caller if all its keys are there, or its time is over; otherwise it goes on waiting."""
        with self._lock:
            lacks = next((key for key in waiter.keys if key not in self._table), None)
            values = [self._table[key] for key in waiter.keys] if lacks is None else None
        if lacks is None or waiter.until_s <= time.monotonic():
            self._answer(waiter.caller, values)
        else:
            waiter.lacks = lacks
            self._waiters[waiter] = None
            self._lacking.setdefault(lacks, []).append(waiter)

    def _forget(self, waiter: _Waiter) -> None:
        """Take a caller off the waiting ones."""
        del self._waiters[waiter]
        beside = self._lacking[waiter.lacks]
        beside.remove(waiter)
        if not beside:
            del self._lacking[waiter.lacks]

    def _answer(self, caller: Peer, value: Any, *, refused: str = "") -> None:
        with contextlib.suppress(OSError):
            self._server.tell(caller, {"type": "value", "value": value, "refused": refused})


_Table = dict[str, str]


def _set(table: _Table, message: Message) -> None:
    keys, values = message["keys"], message["values"]
    if len(keys) != len(values):
        raise ValueError(f"setting {len(keys)} keys to {len(values)} values: expected as many")
    table.update(zip(map(str, keys), map(str, values), strict=True))


def _add(table: _Table, message: Message) -> int:
    key, before = str(message["key"]), table.get(message["key"], "0")
    try:
        total = int(before) + int(message["amount"])
    except ValueError:
        raise ValueError(f"adding to {key}: expected a whole number there, found {before[:_SHOWN_CHARS]!r}") from None
    table[key] = str(total)
    return total


def _append(table: _Table, message: Message) -> None:
    key = str(message["key"])
    table[key] = table.get(key, "") + str(message["value"])


def _compare_set(table: _Table, message: Message) -> str:
    """The value after the operation; if there is none and one was expected, the expected value, as in torch."""
    key, expected, desired = (str(message[name]) for name in ("key", "expected", "desired"))
    if table.get(key, "") == expected:
        table[key] = desired
    return table.get(key, expected)


def _delete(table: _Table, message: Message) -> bool:
    return table.pop(str(message["key"]), None) is not None


def _list(table: _Table, message: Message) -> list[str]:
    return sorted(key for key in table if key.startswith(str(message["prefix"])))


_ACTS: Final[Mapping[str, Callable[[_Table, Message], Any]]] = {
    "set": _set,
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "delete": _delete,
    "list": _list,
    "check": lambda table, message: all(key in table for key in map(str, message["keys"])),
}
