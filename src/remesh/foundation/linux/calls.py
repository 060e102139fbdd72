"""System calls that Python does not offer, by ctypes.

Numbers and layouts are of the kernel's ABI: asm/unistd_64.h, linux/ptrace.h, linux/prctl.h, linux/fs.h. What has a
number in `SYS` is for x86-64; the rest is called by name, on any processor.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Final

PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20

NEW_TIME: Final = 0x00000080
NEW_MOUNTS: Final = 0x00020000
NEW_HOST_NAME: Final = 0x04000000
NEW_USER: Final = 0x10000000
NEW_PID: Final = 0x20000000
NEW_NETWORK: Final = 0x40000000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MS_SLAVE: Final = 0x80000

PR_SET_DEATH_SIGNAL: Final = 1
PR_GET_DEATH_SIGNAL: Final = 2
PR_SET_NAME: Final = 15
PR_SET_TIMER_SLACK: Final = 29
PR_GET_TIMER_SLACK: Final = 30
PR_SET_MM: Final = 35
PR_SET_MM_MAP: Final = 14
PR_SET_CHILD_SUBREAPER: Final = 36
PR_GET_CHILD_SUBREAPER: Final = 37
PR_GET_TID_ADDRESS: Final = 40
PR_SET_NO_NEW_PRIVS: Final = 38
PR_SET_THP_DISABLE: Final = 41

# Numbers of system calls.
SYS: Final = {
    "write": 1,
    "close": 3,
    "lseek": 8,
    "mmap": 9,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "ioctl": 16,
    "mremap": 25,
    "madvise": 28,
    "getitimer": 36,
    "setitimer": 38,
    "clone": 56,
    "execve": 59,
    "exit": 60,
    "wait4": 61,
    "kill": 62,
    "fcntl": 72,
    "chdir": 80,
    "umask": 95,
    "setpgid": 109,
    "setsid": 112,
    "rt_sigtimedwait": 128,
    "sigaltstack": 131,
    "prctl": 157,
    "set_tid_address": 218,
    "epoll_ctl": 233,
    "ioprio_set": 251,
    "ioprio_get": 252,
    "tgkill": 234,
    "openat": 257,
    "set_robust_list": 273,
    "get_robust_list": 274,
    "tee": 276,
    "eventfd2": 290,
    "dup3": 292,
    "pipe2": 293,
    "kcmp": 312,
    "userfaultfd": 323,
    "rseq": 334,
    "close_range": 436,
    "pidfd_getfd": 438,
}

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.ptrace.restype = ctypes.c_long
_libc.process_vm_readv.restype = _libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = _libc.process_vm_writev.argtypes = [
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
]
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


_STATFS_BYTES: Final = 256
"""More than ``struct statfs`` has; the kind of the file system comes first."""
_IN_MEMORY: Final = (0x01021994, 0x858458F6)  # TMPFS_MAGIC, RAMFS_MAGIC


class IoVec(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _raise_errno(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def system_call(name: str, *args: int) -> int:
    """Perform a system call of `SYS` in this process; returns its result. Raises `OSError`."""
    result = int(_libc.syscall(ctypes.c_long(SYS[name]), *(ctypes.c_long(arg) for arg in args)))
    if result == -1:
        _raise_errno(f"system call {name}")
    return result


def is_in_memory(path: str) -> bool:
    """Whether a file has no disk behind it: it lies in a tmpfs or ramfs. Raises `OSError`."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), answer) == -1:
        _raise_errno(f"asking for the file system of {path}")
    return int.from_bytes(answer.raw[:4], "little") in _IN_MEMORY


def ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    """One ptrace request; its result. Raises `OSError`: `ProcessLookupError` when the thread is gone or runs."""
    ctypes.set_errno(0)
    result = int(_libc.ptrace(request, tid, address, data))
    if result == -1 and ctypes.get_errno():
        _raise_errno(f"ptrace request {request:#x} on thread {tid}")
    return result


def prctl(option: int, argument: int = 0) -> None:
    """Set a property of this process or thread. Raises `OSError`."""
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) == -1:
        _raise_errno(f"prctl option {option}")


@contextlib.contextmanager
def as_subreaper() -> Iterator[None]:
    """Within it, orphans among the descendants of this process become its children."""
    was = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.addressof(was))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, was.value)


def setns(descriptor: int, kind: int) -> None:
    """Enter the namespace that a descriptor stands for, of this kind. Raises `OSError`."""
    if _libc.setns(descriptor, kind) == -1:  # Python 3.12 has `os.setns`
        _raise_errno(f"setns {kind:#x}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones; see the ``NEW_`` flags. Raises `OSError`."""
    if _libc.unshare(flags) == -1:
        _raise_errno(f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount or bind ``source`` at ``target``. Raises `OSError`."""
    kind_bytes = kind.encode() if kind is not None else None
    if _libc.mount(os.fsencode(source), os.fsencode(target), kind_bytes, flags, options.encode()) == -1:
        _raise_errno(f"mounting {source} at {target}")


def borrow_descriptor(pid: int, number: int) -> int:
    """Copy an open file of another process into a descriptor of this one, to be closed soon. Raises `OSError`."""
    process = os.pidfd_open(pid)
    try:
        return system_call("pidfd_getfd", process, number, 0)
    finally:
        os.close(process)


def get_robust_list(tid: int) -> tuple[int, int]:
    """Address and length of the list of robust futexes of a thread."""
    head, length = ctypes.c_ulong(), ctypes.c_ulong()
    system_call("get_robust_list", tid, ctypes.addressof(head), ctypes.addressof(length))
    return head.value, length.value


def read_process(pid: int, pieces: array.array[int], rooms: array.array[int]) -> int:
    """Read pieces of the memory of a process into that of this one; returns how many bytes. Raises `OSError`.

    Both have 64-bit numbers: address and length of each piece, at most 1,024.
    """
    here, there = (ctypes.c_void_p(each.buffer_info()[0]) for each in (rooms, pieces))
    result = _libc.process_vm_readv(pid, here, len(rooms) // 2, there, len(pieces) // 2, 0)
    if result == -1:
        _raise_errno("process_vm_readv")
    return int(result)


def write_process(pid: int, address: int, data: memoryview) -> int:
    """Write a writable buffer into memory that a process itself may write; returns how many bytes."""
    remote, local = IoVec(address, len(data)), IoVec(address_of(data), len(data))
    result = _libc.process_vm_writev(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if result == -1:
        _raise_errno("process_vm_writev")
    return int(result)


def give_back_memory() -> None:
    """Give whole pages that are free among what malloc has back to the kernel; does nothing without glibc."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def address_of(buffer: bytearray | memoryview) -> int:
    """The address of a writable buffer of this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def make_buffer(num_bytes: int) -> memoryview:
    """Make writable memory, zero, that begins at a huge page and is made of them where the kernel has some."""
    area = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(area)
    start = -address_of(view) % HUGE_PAGE_BYTES
    return view[start : start + num_bytes]


def is_gone(error: OSError) -> bool:
    """Whether a call failed because its process or thread has ended."""
    return error.errno in (errno.ESRCH, errno.ECHILD)
