"""Small files that the verbs read and write; failures are errors with what to do next."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, TextIO

import click

from remesh.cli.shown import say
from remesh.foundation.errors import ConfigError


def read_text(path: Path, what: str) -> str:
    """The text of a file; ``what`` it is, for the message of a `ConfigError`."""
    try:
        return path.read_text()
    except OSError as raised:
        raise ConfigError(f"reading {what} {path}: {raised.strerror}; name an existing file") from raised
    except UnicodeDecodeError as raised:
        raise ConfigError(f"reading {what} {path}: it is not text ({raised}); name another file") from raised


def read_json(path: Path, what: str) -> Any:
    """The value in a JSON file; `ConfigError` when it is none."""
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as raised:
        raise ConfigError(f"reading {what} {path}: it is not JSON ({raised}); correct it") from raised


class OutputFile:
    """A file that is written at the end of long work and opened at its beginning, in a folder that is there.

    What it held stays until it is written, and for good if the work fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fresh: Path | None = None
        if path.is_dir():
            raise ConfigError(f"opening {path} for writing: it is a folder; name a file")
        try:
            if path.exists() and not path.is_file():
                self._file: TextIO = path.open("w")  # a device or a pipe
            else:
                self._fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
                self._file = self._fresh.open("x")
        except OSError as raised:
            raise _cannot_write(path, raised) from raised

    def write(self, text: str, *, err: bool) -> None:
        """Write it, and print its path, to stderr with ``err``."""
        try:
            self._file.write(text)
            self._file.close()
            if self._fresh is not None:
                self._fresh.replace(self.path)
                self._fresh = None
        except OSError as raised:
            raise _cannot_write(self.path, raised) from raised
        say(f"written to {self.path}", err=err)

    def close(self) -> None:
        """Leave nothing behind that was not written."""
        self._file.close()
        if self._fresh is not None:
            self._fresh.unlink(missing_ok=True)


class OutputPath(click.Path):
    """The type of an option that names a file to write: an `OutputFile`, opened before the verb begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The open output, which is closed with the verb."""
        if isinstance(value, OutputFile):
            return value
        output = OutputFile(Path(value))
        if ctx is not None:
            ctx.call_on_close(output.close)
        return output


def _cannot_write(path: Path, raised: OSError) -> ConfigError:
    return ConfigError(f"writing {path}: {raised.strerror}; name a file in a folder that is there")
