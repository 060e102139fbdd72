"""How does one process learn that another writes to a page? By a *userfaultfd*: pages are write-protected through it.

    make, or an injected call     a descriptor that stands for the memory of the process that made it
    enable                        which of its abilities are wanted; once
    register                      the memory that may be protected
    protect, release              pages of it; whoever writes to a protected one waits for its release
    read_events                   who waits where, and what became of memory

With `Feature.WP_ASYNC` nobody waits: the first write takes the protection off, and a scan of the pages finds that. When
the last descriptor is closed, nothing is protected any more. Source: linux/userfaultfd.h.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from remesh.foundation.linux.calls import SYS, raw_system_call

USER_MODE_ONLY: Final = 1
"""A flag of `make`: faults of the kernel itself are not waited for, which needs no right."""

_NUMBERS: Final = {"x86_64": SYS["userfaultfd"], "aarch64": 282}
_API: Final = 0xC018AA3F
_NEW: Final = 0xAA00
_REGISTER: Final = 0xC020AA00
_WRITE_PROTECT: Final = 0xC018AA06
_VERSION: Final = 0xAA
_REGISTER_WP: Final = 2
_PROTECT, _RELEASE = 1, 0
_MESSAGE: Final = struct.Struct("<B7xQQQ")
_MESSAGES_PER_READ: Final = 64


class Feature(enum.IntFlag):
    """The features of a descriptor."""

    PAGEFAULT_FLAG_WP = 1 << 0
    EVENT_REMAP = 1 << 2
    EVENT_REMOVE = 1 << 3
    EVENT_UNMAP = 1 << 6
    WP_UNPOPULATED = 1 << 13
    """Pages that were never touched can be protected, too."""
    WP_ASYNC = 1 << 15


class EventKind(enum.IntEnum):
    """The kind of an event in registered memory."""

    PAGE_FAULT = 0x12
    REMAP = 0x14
    REMOVE = 0x15
    UNMAP = 0x16


class Event(NamedTuple):
    """One event: at a page, or for the addresses ``[start, end)``."""

    kind: int  # an `EventKind`, or another that was not asked for
    start: int
    end: int


def make(flags: int) -> int:
    """Make a descriptor for the memory of this process. Raises `OSError` where the system does not allow it."""
    machine = os.uname().machine
    if machine not in _NUMBERS:
        raise OSError(errno.ENOSYS, f"no userfaultfd is known on {machine}")
    try:
        return raw_system_call(_NUMBERS[machine], flags)
    except OSError as refused:
        try:  # another way to allow it: by the rights of a file
            with open("/dev/userfaultfd", "rb", buffering=0) as device:
                return fcntl.ioctl(device, _NEW, flags)
        except OSError as error:
            raise refused from error


def enable(descriptor: int, features: Feature) -> None:
    """Choose the features of a new descriptor. Raises `OSError` where the kernel does not know one."""
    fcntl.ioctl(descriptor, _API, bytearray(struct.pack("<3Q", _VERSION, features, 0)))


def register(descriptor: int, start: int, num_bytes: int) -> None:
    """Let pages of a range be protected from now on."""
    fcntl.ioctl(descriptor, _REGISTER, bytearray(struct.pack("<4Q", start, num_bytes, _REGISTER_WP, 0)))


def protect(descriptor: int, start: int, num_bytes: int) -> None:
    """Protect pages. Raises `BlockingIOError` while mappings are being changed: read the events, and do it again."""
    fcntl.ioctl(descriptor, _WRITE_PROTECT, bytearray(struct.pack("<3Q", start, num_bytes, _PROTECT)))


def release(descriptor: int, start: int, num_bytes: int) -> None:
    """Let waiting threads go on, and anybody write. Raises as `protect`; `FileNotFoundError` if the memory is gone."""
    fcntl.ioctl(descriptor, _WRITE_PROTECT, bytearray(struct.pack("<3Q", start, num_bytes, _RELEASE)))


def read_events(descriptor: int) -> Iterator[Event]:
    """Read the events that were not read yet; nothing is waited for, with a descriptor that does not block."""
    try:
        messages = os.read(descriptor, _MESSAGES_PER_READ * _MESSAGE.size)
    except BlockingIOError:
        return
    for kind, first, second, third in _MESSAGE.iter_unpack(messages):
        if kind == EventKind.PAGE_FAULT:  # flags, address
            yield Event(kind, second, second)
        elif kind == EventKind.REMAP:  # from, to, length
            yield Event(kind, first, first + third)
        else:
            yield Event(kind, first, second)
