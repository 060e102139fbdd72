"""Shared words, the memory of another process, addresses of buffers: the C extension, or its twin in ctypes.

Both have the same functions with the same arguments; ``_fast.c`` says what each does. The twin lacks the fences of the
C form, so its waits are short: a wake-up that is missed costs a few milliseconds, never more.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, 0)
_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_WAKE_OP = 0, 1, 5
_ADD, _OR, _AND_NOT = 1, 2, 3  # what FUTEX_WAKE_OP does
_GATE_CLOSED, _GATE_ONE_INSIDE = 1, 2
_PROT_READ_WRITE, _MAP_SHARED = 3, 1
_EVERYBODY = 0x7FFFFFFF
_LONGEST_WAIT_US = 5000
_DOORBELL, _REPLY, _WAITING = 64, 64, 128  # where they stand in a channel and its slots: channel.py
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def _futex(address: int, operation: int, value: int, timeout_us: int) -> None:
    span = _Timespec(timeout_us // 1_000_000, timeout_us % 1_000_000 * 1000)
    arguments = (ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address), ctypes.c_long(operation), ctypes.c_uint(value))
    _libc.syscall(*arguments, ctypes.byref(span), None, ctypes.c_long(0))


def _change(address: int, operation: int, operand: int) -> None:
    """Change a word at once, and in order with all that stands before and after: by the kernel, for want of a fence."""
    code = ctypes.c_int32((operation << 28) | ((operand & 0xFFF) << 12))
    place, none = ctypes.c_void_p(address), ctypes.c_long(0)
    if _libc.syscall(ctypes.c_long(_SYS_FUTEX), place, ctypes.c_long(_FUTEX_WAKE_OP), none, none, place, code) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"changing a word of the channel by futex: {os.strerror(number)}")


def close_gate(word: int) -> None:
    """Let no thread of the program into a file any more."""
    _change(word, _OR, _GATE_CLOSED)


def open_gate(word: int) -> None:
    """Let them in again."""
    _change(word, _AND_NOT, _GATE_CLOSED)


class Gate:
    """As a context: a thread is in a file that other ranks have open. ``channel.py`` says how it is kept."""

    def __init__(self, word: int, wait: Callable[[], object]) -> None:
        self._word, self._wait = word, wait
        self._mine = threading.local()

    def _try(self) -> bool:
        _change(self._word, _ADD, _GATE_ONE_INSIDE)
        if _word(self._word).value & _GATE_CLOSED:
            _change(self._word, _ADD, -_GATE_ONE_INSIDE)
            return False
        return True

    def __enter__(self) -> None:
        depth = getattr(self._mine, "depth", 0)
        while not depth and not self._try():
            self._wait()
        self._mine.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        if not self._mine.depth:
            _change(self._word, _ADD, -_GATE_ONE_INSIDE)


def call(base: int, slot: int) -> None:
    """Post the request in a slot of the channel at ``base`` and wait for its reply; both are addresses."""
    reply, waiting = slot + _REPLY, slot + _WAITING
    number = (_word(slot).value + 1) & 0xFFFFFFFF
    _word(slot).value = number
    ring(base + _DOORBELL)
    while _word(reply).value != number:
        _word(waiting).value = 1
        seen = _word(reply).value
        if seen != number:
            _futex(reply, _FUTEX_WAIT, seen, _LONGEST_WAIT_US)
        _word(waiting).value = 0


def answer(request: int, reply: int, waiting: int) -> None:
    """The reply stands in the slot: tell the caller."""
    _word(reply).value = _word(request).value
    _futex(reply, _FUTEX_WAKE, _EVERYBODY, 0)


def pending(first_request: int, reply_offset: int, stride: int, count: int) -> int:
    """Bit i is set where slot i has a request without a reply."""
    mask = 0
    for number in range(count):
        slot = first_request + number * stride
        if _word(slot).value != _word(slot + reply_offset).value:
            mask |= 1 << number
    return mask


def wait(doorbell: int, sleeping: int, seen: int, spin: int, timeout_us: int) -> int:
    """Wait until the doorbell differs from ``seen``; its value."""
    if timeout_us and _word(doorbell).value == seen:
        _futex(doorbell, _FUTEX_WAIT, seen, min(timeout_us, _LONGEST_WAIT_US))
    return _word(doorbell).value


def ring(doorbell: int) -> None:
    """Wake whoever waits at a doorbell."""
    word = _word(doorbell)
    word.value = (word.value + 1) & 0xFFFFFFFF
    _futex(doorbell, _FUTEX_WAKE, _EVERYBODY, 0)


def _copy(function: Any, pid: int, remote: int, local: int, num_bytes: int) -> None:
    done = 0
    function.restype = ctypes.c_ssize_t
    while done < num_bytes:
        step = min(num_bytes - done, 1 << 30)
        here, there = _Piece(local + done, step), _Piece(remote + done, step)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        moved = function(ctypes.c_int(pid), ctypes.byref(here), one, ctypes.byref(there), one, none)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += moved


def read_memory(pid: int, remote: int, local: int, num_bytes: int) -> None:
    """Copy memory of another process here."""
    _copy(_libc.process_vm_readv, pid, remote, local, num_bytes)


def write_memory(pid: int, remote: int, local: int, num_bytes: int) -> None:
    """Copy memory of this process there."""
    _copy(_libc.process_vm_writev, pid, remote, local, num_bytes)


def relay(*words: int) -> None:
    """Memory of one process into another's, through a piece of ours."""
    source_pid, source, target_pid, target, staging, staging_bytes, num_bytes = words
    for done in range(0, num_bytes, staging_bytes):
        step = min(staging_bytes, num_bytes - done)
        read_memory(source_pid, source + done, staging, step)
        write_memory(target_pid, target + done, staging, step)


class _Buffer(ctypes.Structure):
    """The head of CPython's Py_buffer, padded to more than its size."""

    _fields_ = [("start", ctypes.c_void_p), ("rest", ctypes.c_byte * 120)]


def address_of(buffer: Any) -> int:
    """Where the bytes of a contiguous buffer stand."""
    view = _Buffer()
    any_contiguous = 0x0080 | 0x0010 | 0x0008
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), ctypes.c_int(any_contiguous))
    address = view.start or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address


def map_file(path: str, num_bytes: int) -> memoryview:
    """A shared, writable mapping of a file; no descriptor stays open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            raise OSError(22, f"mapping {path}: the file is shorter than {num_bytes} bytes")
        start = _libc.mmap(None, num_bytes, _PROT_READ_WRITE, _MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if start in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mapping {path}: {os.strerror(ctypes.get_errno())}")
    return memoryview((ctypes.c_char * num_bytes).from_address(start)).cast("B")


def measure_spin_rate() -> float:
    """Turns of the C spin loop in a microsecond on this machine; 0 with the twin, which does not spin."""
    if not isinstance(NATIVE, ModuleType):
        return 0.0
    word = ctypes.c_uint32(0)
    turns = 20_000
    begin = time.perf_counter()
    NATIVE.wait(ctypes.addressof(word), ctypes.addressof(word), 0, turns, 0)
    return turns / max(1e-9, time.perf_counter() - begin) / 1e6


class Port:
    """The upper half's short way, which is there only with the extension: everything is left to the long one."""

    def __init__(self, base: int, slot: int) -> None:
        """A thread's slot of the channel that is mapped at ``base``."""

    def post(self, *_: Any) -> bool:
        """Nothing is posted."""
        return False

    start_receive = send = collective = post_access = post_unlock = post

    def receive(self, *_: Any) -> None:
        """Nothing is received."""

    wait = start = start_collective = exchange = access = receive


TWIN = SimpleNamespace(
    Port=Port,
    Gate=Gate,
    ViewData=None,
    Engine=None,
    Exporter=object,
    call=call,
    answer=answer,
    pending=pending,
    wait=wait,
    ring=ring,
    close_gate=close_gate,
    open_gate=open_gate,
    read_memory=read_memory,
    write_memory=write_memory,
    relay=relay,
    address_of=address_of,
    map_file=map_file,
    map_at=None,
)


def _load() -> Any:
    if os.environ.get("REMESH_NATIVE") != "ctypes":
        try:
            return importlib.import_module("remesh.mpi._fast")
        except ImportError:
            pass
    return TWIN


NATIVE: Any = _load()
"""The extension where it has been built; else, or with ``REMESH_NATIVE=ctypes``, the twin."""
