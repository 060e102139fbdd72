"""Location of a checkpoint: a path of this machine, or a URL of a store (``s3://bucket/run/step-120``).

Both kinds are values with the same interface (join, name, parent): `pathlib.Path` and `RemotePath`. What can be done at
a location is the business of its store, which `store_of` finds. A URL names a place and nothing else: credentials come
from the environment, so that none gets into a manifest, a log or an error.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from remesh.checkpoint.storage.fsspec_client import FsspecClient
from remesh.checkpoint.storage.obstore_client import ObstoreClient
from remesh.checkpoint.storage.obstore_settings import SCHEMES
from remesh.checkpoint.storage.remote import RemoteStore
from remesh.checkpoint.storage.remote_path import RemotePath
from remesh.checkpoint.storage.store import LocalStore, Store
from remesh.foundation.errors import ConfigError
from remesh.foundation.options import OptionError

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://(?P<rest>.*)", re.DOTALL)
_FLATTENED_URL = re.compile(r"[a-z][a-z0-9+.\-]+:/(?!/)")


Location = Path | RemotePath
"""Where a file or directory is."""
Directory = str | os.PathLike[str] | RemotePath
"""What callers may give for a location."""


def location_of(given: Directory) -> Location:
    """The location that a path or URL names; `ConfigError` for a URL that cannot be used, or for no path at all.

    A relative path is resolved now: what is done there later, in the background, does not follow a ``chdir``. ``~`` is
    the home of the user, as in a shell.

    >>> str(location_of("memory://run/step-00000120/"))
    'memory://run/step-00000120'
    """
    if isinstance(given, RemotePath):
        return given
    try:
        text = os.fspath(given)
    except TypeError:
        raise _no_place(given) from None
    match = _URL.fullmatch(text)
    if match is None:
        if "://" in text or (isinstance(given, Path) and not given.is_absolute() and _FLATTENED_URL.match(text)):
            raise ConfigError(
                f"finding the place {text!r}: it is neither a path nor a URL, expected one of the two, as "
                "s3://bucket/folder; give a URL as a string, since pathlib turns two slashes into one"
            )
        try:
            return Path(text).expanduser().absolute()
        except RuntimeError as raised:
            raise ConfigError(
                f"finding the place {text!r}: {raised}; name a user who is there, or begin with ./"
            ) from None
    scheme, rest = match["scheme"].lower(), match["rest"].rstrip("/")
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"finding a place of {scheme}://: the URL holds credentials, expected none; set them in the environment, "
            "where the store's own client looks for them"
        )
    return Path(rest).absolute() if scheme in ("file", "local") else RemotePath(scheme, rest)


def is_location(given: object) -> bool:
    """Whether this names a place."""
    try:
        location_of(given)  # type: ignore[arg-type]
    except (ConfigError, TypeError):
        return False
    return True


def _no_place(given: object) -> OptionError:
    kind, hint = f"a value of type {type(given).__name__}", "correct the arguments"
    if given is None:
        kind, hint = "None", "where there is no checkpoint yet, begin without loading"
    return OptionError(f"finding a checkpoint: found {kind}, expected a path or a URL; {hint}")


_LOCAL = LocalStore()


def store_of(location: Location) -> Store[Any]:
    """The store that keeps what is at a location."""
    return _LOCAL if isinstance(location, Path) else _remote_store(location.scheme)


@lru_cache
def _remote_store(scheme: str) -> RemoteStore:
    return RemoteStore(ObstoreClient() if scheme in SCHEMES else FsspecClient(scheme))
