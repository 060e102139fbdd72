"""Set-once keys of all agents on a c10d store, and a counter of changes that they wait for.

Values are JSON, signed with the job's token and the key they stand under: a value that does not fit was not written by
an agent of this job and counts as not there. ``notify_change`` raises a counter that all agents read instead of every
key; counters are not signed, for a wrong count only makes agents look more often.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from remesh.wire.token import Token

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""What stands around a request, to end it when its host falls silent."""
_CHANGES = "bell"
MAX_VALUE_BYTES = 8 << 20
"""A longer value is not of an agent: a plan for 16,384 workers has less than 2 MiB."""


class JobStore:
    """A thin face over a store that many processes use at once."""

    def __init__(self, store: dist.Store, token: Token, guard: Guard = contextlib.nullcontext) -> None:
        self._store = store
        self._token = token
        self._guard = guard

    def move_to(self, other: JobStore) -> None:
        """Use another store from now on, for all holders of this object."""
        self._store, self._token, self._guard = other._store, other._token, other._guard

    def notify_change(self) -> None:
        self.count(_CHANGES, 1)

    def num_changes(self) -> int:
        """How many changes there were so far."""
        return self.count(_CHANGES)

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter and return it."""
        with self._guard():
            return int(self._store.add(key, by))

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        with self._guard():
            self._store.set(key, self._seal(key, value))

    def put_once(self, key: str, value: Mapping[str, Any]) -> None:
        """Set a key if it is not set; otherwise leave it."""
        with self._guard():
            self._store.compare_set(key, "", self._seal(key, value))

    def swap(self, key: str, seen: Mapping[str, Any] | None, value: Mapping[str, Any]) -> dict[str, Any] | None:
        """Set a key if it still holds what was seen there (None: nothing), and return what it holds then."""
        before = "" if seen is None else self._seal(key, seen)
        with self._guard():
            found = bytes(self._store.compare_set(key, before, self._seal(key, value)))
        return self._open(key, found)

    def get(self, key: str) -> dict[str, Any] | None:
        """The value, or None if no agent of this job has set it."""
        with self._guard():
            if not self._store.check([key]):
                return None
            sealed = bytes(self._store.get(key))
        return self._open(key, sealed)

    def get_all(self, keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """The values of keys that were set before, in one request; None for what no agent of this job has set."""
        if not keys:
            return []
        with self._guard():
            sealed = self._store.multi_get(list(keys))
        return [self._open(key, bytes(one)) for key, one in zip(keys, sealed, strict=True)]

    def _open(self, key: str, sealed: bytes) -> dict[str, Any] | None:
        data = self._token.unseal(key, sealed) if len(sealed) <= MAX_VALUE_BYTES else None
        try:
            value = None if data is None else json.loads(data)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def _seal(self, key: str, value: Mapping[str, Any]) -> str:
        return self._token.seal(key, json.dumps(value).encode()).decode()
