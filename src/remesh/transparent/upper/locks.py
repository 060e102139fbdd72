"""Locks that mpi4py.util keeps on communicators."""

from __future__ import annotations

import threading
from typing import Any


def comm_lock_table(comm: Any) -> dict[Any, Any]:
    """The locks of a communicator, by key."""
    table: dict[Any, Any] = comm._members.locks
    return table


def comm_lock(comm: Any, key: Any = None) -> Any:
    """The lock of a communicator under a key."""
    table = comm_lock_table(comm)
    if key not in table:
        table[key] = threading.Lock()
    return table[key]
