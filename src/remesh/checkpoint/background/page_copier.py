"""A process that copies pages of another one as they were when it was asked.

Started as ``python page_copier.py FD PID``. It imports nothing but the standard library, so it is there in a moment
and stays small. One job after the other comes through the socket FD, with the descriptor of a userfaultfd of the
process PID and that of the memory to copy into:

    protect   pages of the job are write-protected; "protected" is answered, and the other process goes on
    copy      block by block; a block that is copied is released from its protection
    (fault)   who writes to a protected page waits until its block is copied, which is done first then
    end       the userfaultfd is closed, by which nothing is protected any more; the answer says how it went

Nobody else holds the userfaultfd. Should this process die, the system closes it and lets every writer go on.
Memory that is unmapped or moved before it is copied fails the job; its copy would not be true.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 2 << 20
"""Copied and released together: a huge page, which a smaller part would break up."""
HEAD = struct.Struct("<Q")
"""Length of a job in JSON; its two descriptors come along."""

_REGISTER, _WRITE_PROTECT = 0xC020AA00, 0xC018AA06
_REGISTER_WP, _PROTECT, _RELEASE = 2, 1, 0
_PAGE_FAULT, _REMAP, _REMOVE, _UNMAP = 0x12, 0x14, 0x15, 0x16
_MESSAGE = struct.Struct("<B7xQQQ")
_MAX_IOVECS = 512
_MAX_TRIES = 10_000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class _IoVec(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class Lost(Exception):
    """Memory was given back before it was copied."""


@dataclass(slots=True)
class _Block:
    """What lies in one block of the other process's addresses."""

    pages: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that are protected: first address and length."""
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    """Address, length, and place in the copy."""


class _Job:
    def __init__(self, pid: int, faults: int, copy: int, runs: list[list[int]], moves: list[list[int]]) -> None:
        self._pid = pid
        self._faults = faults
        self._runs = runs
        self._moves = moves
        self._memory = mmap.mmap(copy, 0)
        self._copy_start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pending: dict[int, _Block] = {}
        self._released: dict[int, _Block] = {}

    def protect(self) -> None:
        """See that memory can be read, and let every page of the job be written to no more."""
        self._read([(self._runs[0][0], 1, self._moves[0][2])])  # overwritten by the copy
        for start, stop in self._runs:
            fcntl.ioctl(self._faults, _REGISTER, bytearray(struct.pack("<4Q", start, stop - start, _REGISTER_WP, 0)))
        for start, stop in self._runs:
            self._set_protection(start, stop - start, _PROTECT)

    def copy(self) -> None:
        """Copy all, what somebody waits for first."""
        self._cut()
        while self._pending:
            self._serve()
            if self._pending:
                self._finish(next(iter(self._pending)))

    def _cut(self) -> None:
        for start, stop in self._runs:
            for number, first, last in _cut(start, stop):
                self._pending.setdefault(number, _Block()).pages.append((first, last - first))
        for start, num_bytes, place in self._moves:
            for number, first, last in _cut(start, start + num_bytes):
                self._pending[number].moves.append((first, last - first, place + first - start))

    def _serve(self) -> None:
        try:
            messages = os.read(self._faults, 64 * _MESSAGE.size)
        except BlockingIOError:
            return
        for event, first, second, third in _MESSAGE.iter_unpack(messages):
            if event == _PAGE_FAULT:
                self._finish(second // BLOCK_BYTES)
            elif event in (_REMOVE, _UNMAP):
                self._lose(first, second)
            elif event == _REMAP:
                self._lose(first, first + third)

    def _lose(self, start: int, stop: int) -> None:
        for block in self._pending.values():
            if any(first < stop and start < first + num_bytes for first, num_bytes, _ in block.moves):
                raise Lost(f"memory at {start:#x} was given back or moved before it was copied")

    def _finish(self, number: int) -> None:
        block = self._pending.pop(number, None)
        if block is not None:
            self._read(block.moves)
            self._released[number] = block
        for start, num_bytes in self._released[number].pages:
            self._set_protection(start, num_bytes, _RELEASE)

    def _set_protection(self, start: int, num_bytes: int, mode: int) -> None:
        for _ in range(_MAX_TRIES):
            try:
                fcntl.ioctl(self._faults, _WRITE_PROTECT, bytearray(struct.pack("<3Q", start, num_bytes, mode)))
                return
            except OSError as raised:
                if raised.errno == errno.ENOENT and mode == _RELEASE:
                    return  # unmapped since; `_serve` sees whether that matters
                if raised.errno != errno.EAGAIN:
                    raise
            self._serve()  # mappings are being changed; who changes them waits to be heard
        raise OSError(errno.EAGAIN, f"memory at {start:#x} does not come to rest")

    def _read(self, moves: list[tuple[int, int, int]]) -> None:
        for at in range(0, len(moves), _MAX_IOVECS):
            some = moves[at : at + _MAX_IOVECS]
            ours = (_IoVec * len(some))(*(_IoVec(self._copy_start + place, size) for _, size, place in some))
            theirs = (_IoVec * len(some))(*(_IoVec(start, size) for start, size, _ in some))
            wanted = sum(size for _, size, _ in some)
            found = _libc.process_vm_readv(self._pid, ours, len(some), theirs, len(some), 0)
            if found != wanted:
                code = ctypes.get_errno() if found < 0 else errno.EFAULT
                raise OSError(code, f"reading {wanted} bytes of process {self._pid}: {os.strerror(code)}")


def _cut(start: int, stop: int) -> list[tuple[int, int, int]]:
    """A range cut at blocks: number of the block, first and last address."""
    numbers = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
    return [(one, max(start, one * BLOCK_BYTES), min(stop, (one + 1) * BLOCK_BYTES)) for one in numbers]


def _do(end: socket.socket, pid: int, descriptors: tuple[int, int], told: dict[str, Any]) -> None:
    faults, copy = descriptors

    def answer(text: str) -> None:
        end.sendall(json.dumps(text).encode() + b"\n")

    try:
        try:
            job = _Job(pid, faults, copy, told["runs"], told["moves"])
            job.protect()
            answer("protected")
            job.copy()
        finally:
            os.close(faults)  # nothing is protected any more
            os.close(copy)
        answer("copied")
    except (Lost, OSError, KeyError) as raised:
        answer(f"failed: {raised}")


def main() -> None:
    """Do jobs until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the training loop
    end, pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            head, descriptors, _, _ = socket.recv_fds(end, HEAD.size, 2)
            if len(descriptors) != 2:
                return
            with contextlib.closing(end.makefile("rb", buffering=0)) as body:
                text, (num_bytes,) = b"", HEAD.unpack(head)
                while len(text) < num_bytes and (more := body.read(num_bytes - len(text))):
                    text += more
            _do(end, pid, (descriptors[0], descriptors[1]), json.loads(text))


if __name__ == "__main__":
    main()
