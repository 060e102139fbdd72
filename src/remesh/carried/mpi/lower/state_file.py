"""File of a lower half's state in a checkpoint: in the folder of its rank, under its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from remesh.foundation.errors import FormatError, StorageError
from remesh.foundation.files import write_new

STATE: Final = "lower.state"


def write_state(folder: Path, data: bytes) -> None:
    """Put the state into a rank's folder; it is on disk when this returns."""
    path = folder / STATE
    try:
        write_new(path, data)
    except OSError as error:
        raise StorageError(f"writing {path}: {error.strerror}; check its free space and permissions") from error


def read_state(folder: Path, report: Mapping[str, Any]) -> bytes:
    """The state in a rank's folder, checked against what the manifest says of that rank."""
    path = folder / STATE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror}; choose another checkpoint") from error
    if hashlib.sha256(data).hexdigest() != report.get("lower_sha256"):
        raise FormatError("bad-state", f"reading {path}: its digest does not match; choose another checkpoint")
    return data
