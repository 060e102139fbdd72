"""Write protection of another process's pages by a *userfaultfd*, so that the kernel notes which were written.

    an injected call    a descriptor that stands for the memory of the process that made it
    enable              which of its abilities are wanted; once
    register            the memory that may be protected

With `Feature.WP_ASYNC` no thread waits: the first write takes the protection off, and a scan of the pages finds that.
When the last descriptor is closed, nothing is protected any more. Source: linux/userfaultfd.h.
"""

from __future__ import annotations

import enum
import fcntl
import struct
from typing import Final

USER_MODE_ONLY: Final = 1
"""A flag of the call: faults of the kernel itself are not waited for, which needs no right."""

_API: Final = 0xC018AA3F
_REGISTER: Final = 0xC020AA00
_VERSION: Final = 0xAA
_REGISTER_WP: Final = 2


class Feature(enum.IntFlag):
    """The features of a descriptor."""

    WP_UNPOPULATED = 1 << 13
    """Pages that were never touched can be protected, too."""
    WP_ASYNC = 1 << 15


def enable(descriptor: int, features: Feature) -> None:
    """Choose the features of a new descriptor. Raises `OSError` where the kernel does not know one."""
    fcntl.ioctl(descriptor, _API, bytearray(struct.pack("<3Q", _VERSION, features, 0)))


def register(descriptor: int, start: int, num_bytes: int) -> None:
    """Let pages of a range be protected from now on."""
    fcntl.ioctl(descriptor, _REGISTER, bytearray(struct.pack("<4Q", start, num_bytes, _REGISTER_WP, 0)))
