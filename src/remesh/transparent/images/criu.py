"""Is CRIU here, and can it work on this kernel? It is the second engine, where its version is 4.1 or newer.

Older ones fail on kernels from 6.13 on, whose own areas in a process they do not know.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

_OLDEST: Final = (4, 1)
_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU on the PATH."""

    path: str
    version: str  # "4.1.1"; "" when it does not tell

    @property
    def is_able(self) -> bool:
        """Whether its version is new enough."""
        return version_of(self.version) >= _OLDEST


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version.

    >>> version_of("4.1.1") >= (4, 1), version_of("3.17.1") >= (4, 1), version_of("")
    (True, False, ())
    """
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def find_criu() -> Criu | None:
    """The CRIU on the PATH, if any."""
    path = shutil.which("criu")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Criu(path, "")
    match = re.search(r"Version:\s*(\S+)", done.stdout)
    return Criu(path, match.group(1) if match else "")
