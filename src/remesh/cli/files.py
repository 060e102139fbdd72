"""How do verbs read and write small files? With one message when that does not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from remesh.errors import ConfigError, StorageError


def read_text(path: Path, what: str) -> str:
    """The text of a file; ``what`` it is, for the message of a `StorageError`."""
    try:
        return path.read_text()
    except OSError as raised:
        raise StorageError(f"reading {what} {path}: {raised.strerror}; name a file that is there") from raised
    except UnicodeDecodeError as raised:
        raise StorageError(f"reading {what} {path}: it is not text ({raised}); name another file") from raised


def read_json(path: Path, what: str) -> Any:
    """The value in a JSON file; `ConfigError` when it is none."""
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as raised:
        raise ConfigError(f"reading {what} {path}: it is not JSON ({raised}); mend it") from raised


def write_text(path: Path, text: str, console: Console) -> None:
    """Write a file, and say so."""
    try:
        path.write_text(text)
    except OSError as raised:
        raise StorageError(f"writing {path}: {raised.strerror}; name a file in a folder that is there") from raised
    console.print(f"written to {path}", soft_wrap=True)
