"""What all agents share: set-once keys and a bell on a c10d store.

Values are JSON. ``ring`` raises a counter that everybody reads instead of reading every key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

_BELL = "bell"


class JobStore:
    """A thin face over a store that many processes use at once."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def ring(self) -> None:
        self._store.add(_BELL, 1)

    def rings(self) -> int:
        """How often the bell rang so far."""
        return int(self._store.add(_BELL, 0))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter and return it."""
        return int(self._store.add(key, by))

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        self._store.set(key, json.dumps(value))

    def put_once(self, key: str, value: Mapping[str, Any]) -> None:
        """Set a key that nobody has set; otherwise leave it."""
        self._store.compare_set(key, "", json.dumps(value))

    def get(self, key: str) -> dict[str, Any] | None:
        """The value, or None if nobody has set it."""
        if not self._store.check([key]):
            return None
        value = json.loads(self._store.get(key))
        return value if isinstance(value, dict) else None
