"""Notice file by which a program finds its keeper, before it has a connection and after a cut.

The file is bound into the program's mount namespace under a path that is the same on every host, and is never replaced:
a notice is written into it first, and then the number that makes the notice valid.

    8 bytes   number, larger than that of the notice before
    8 bytes   length of the JSON
    JSON
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from remesh.foundation.errors import FormatError

GROWTH_PREFIX: Final = "remesh/"
"""The prefix of the keys in the job's store by which groups meet again; the keys are not needed afterwards."""
INTERFACE_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
"""The environment variable in which gloo looks for its network interface."""
_WORD: Final = struct.Struct("<Q")
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Notice:
    """Where a program finds its keeper and the other ranks now."""

    number: int
    keeper: tuple[str, int]
    """Where this rank's keeper listens."""
    store: tuple[str, int]
    """Where the store of the job listens."""
    secret: str
    """The job's secret, in hexadecimal digits."""
    growth: str
    """Prefix of the keys by which groups meet again."""
    interface: str
    """The network interface for gloo."""
    ended: tuple[int, ...] = ()
    """Ranks whose programs are over."""


def write_notice(path: Path, notice: Notice) -> None:
    """Put a notice into the file, in place."""
    data = json.dumps(asdict(notice)).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, _WORD.pack(len(data)) + data, _WORD.size)
        os.pwrite(descriptor, _WORD.pack(notice.number), 0)
    finally:
        os.close(descriptor)


def read_notice(path: Path, after: int) -> Notice | None:
    """The notice in the file if its number is larger than ``after``; None if there is none yet."""
    with path.open("rb") as file:
        head = file.read(2 * _WORD.size)
        if len(head) < 2 * _WORD.size or _WORD.unpack_from(head)[0] <= after:
            return None
        length = _WORD.unpack_from(head, _WORD.size)[0]
        data = file.read(min(length, _MAX_BYTES))
    try:
        value = json.loads(data)
        value |= {name: (str(value[name][0]), int(value[name][1])) for name in ("keeper", "store")}
        return Notice(**{**value, "ended": tuple(value["ended"])})
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            "bad-notice", f"reading the notice {path}: {error!r}; its keeper is of another version"
        ) from error
