"""What all agents share: set-once keys and a bell on a c10d store.

Values are JSON, signed with the job's token and the key they stand under: a value that does not fit was not written by
an agent of this job and counts as not there. ``ring`` raises a counter that everybody reads instead of reading every
key; counters are not signed, for a wrong count only makes agents look more often.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from remesh.elastic.token import MAC_BYTES, Token

_BELL = "bell"
MAX_VALUE_BYTES = 8 << 20
"""A longer value is not ours: a plan for 16,384 workers stays below 2 MiB."""


class JobStore:
    """A thin face over a store that many processes use at once."""

    def __init__(self, store: dist.Store, token: Token) -> None:
        self._store = store
        self._token = token

    def ring(self) -> None:
        self._store.add(_BELL, 1)

    def rings(self) -> int:
        """How often the bell rang so far."""
        return int(self._store.add(_BELL, 0))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter and return it."""
        return int(self._store.add(key, by))

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        self._store.set(key, self._seal(key, value))

    def put_once(self, key: str, value: Mapping[str, Any]) -> None:
        """Set a key that nobody has set; otherwise leave it."""
        self._store.compare_set(key, "", self._seal(key, value))

    def get(self, key: str) -> dict[str, Any] | None:
        """The value, or None if no agent of this job has set it."""
        if not self._store.check([key]):
            return None
        sealed = bytes(self._store.get(key))
        if len(sealed) > MAX_VALUE_BYTES:
            return None
        mac, data = sealed[: 2 * MAC_BYTES], sealed[2 * MAC_BYTES :]
        try:
            if not self._token.fits(key, data, bytes.fromhex(mac.decode())):
                return None
            value = json.loads(data)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def _seal(self, key: str, value: Mapping[str, Any]) -> str:
        text = json.dumps(value)
        return self._token.sign(key, text.encode()).hex() + text
