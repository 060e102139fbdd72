"""Where checkpoints are kept: one small interface over the file system and every URL that fsspec knows.

location_of("s3://bucket/run")   text to a `Location`, which joins like a path
store_of(location)               what can be done there: read, put, create, list, remove
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from remesh.checkpoint.storage.interface import Entry, NewFile, RangedFile, Store
from remesh.checkpoint.storage.local import LocalStore
from remesh.checkpoint.storage.location import Directory, Location, RemotePath, location_of
from remesh.checkpoint.storage.remote import RemoteStore

__all__ = [
    "Directory",
    "Entry",
    "Location",
    "NewFile",
    "RangedFile",
    "RemotePath",
    "Store",
    "location_of",
    "store_of",
]

_LOCAL = LocalStore()


def store_of(location: Location) -> Store[Any]:
    """The store that keeps what is at a location."""
    return _LOCAL if isinstance(location, Path) else _remote_store(location.scheme)


@lru_cache
def _remote_store(scheme: str) -> RemoteStore:
    return RemoteStore(scheme)
