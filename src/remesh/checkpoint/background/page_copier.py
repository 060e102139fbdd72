"""A process that copies pages of another one as they were when it was asked.

Started as ``python -m remesh.checkpoint.background.page_copier FD PID``, without ``site``. It imports little, so it is
there in a moment and stays small. One job after the other comes through the socket FD, with the descriptor of a
userfaultfd of the process PID and that of the memory to copy into:

    protect   pages of the job are write-protected; "protected" is answered, and the other process goes on
    copy      block by block; a block that is copied is released from its protection
    (fault)   who writes to a protected page waits until its block is copied, which is done first then
    end       the userfaultfd is closed, by which nothing is protected any more; the answer says how it went

Nobody else holds the userfaultfd. Should this process die, the system closes it and lets every writer go on.
Memory that is unmapped or moved before it is copied fails the job; its copy would not be true.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remesh.foundation.linux import userfault
from remesh.foundation.linux.calls import address_of, read_process
from remesh.foundation.linux.userfault import EventKind

BLOCK_BYTES = 2 << 20
"""Copied and released together: a huge page, which a smaller part would break up."""
HEAD = struct.Struct("<Q")
"""Length of a job in JSON; its two descriptors come along."""

_MAX_PIECES = 512
_MAX_TRIES = 10_000


class Lost(Exception):
    """Memory was given back before it was copied."""


@dataclass(slots=True)
class _GuardedBlock:
    """The protected memory in one block of the other process's addresses."""

    pages: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that are protected: first address and length."""
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    """Address, length, and place in the copy."""


class _CopyJob:
    def __init__(self, pid: int, faults: int, copy: int, runs: list[list[int]], moves: list[list[int]]) -> None:
        self._pid = pid
        self._faults = faults
        self._runs = runs
        self._moves = moves
        self._memory = mmap.mmap(copy, 0)
        self._copy_start = address_of(memoryview(self._memory))
        self._pending: dict[int, _GuardedBlock] = {}
        self._released: dict[int, _GuardedBlock] = {}

    def protect(self) -> None:
        """See that memory can be read, and let every page of the job be written to no more."""
        self._read([(self._runs[0][0], 1, self._moves[0][2])])  # overwritten by the copy
        for start, stop in self._runs:
            userfault.register(self._faults, start, stop - start)
        for start, stop in self._runs:
            self._until_at_rest(userfault.protect, start, stop - start)

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
                self._pending.setdefault(number, _GuardedBlock()).pages.append((first, last - first))
        for start, num_bytes, place in self._moves:
            for number, first, last in _cut(start, start + num_bytes):
                self._pending[number].moves.append((first, last - first, place + first - start))

    def _serve(self) -> None:
        for event in userfault.read_events(self._faults):
            if event.kind == EventKind.PAGE_FAULT:
                self._finish(event.start // BLOCK_BYTES)
            else:
                self._lose(event.start, event.end)

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
            with contextlib.suppress(FileNotFoundError):  # unmapped since; `_serve` sees whether that matters
                self._until_at_rest(userfault.release, start, num_bytes)

    def _until_at_rest(self, change: Callable[[int, int, int], None], start: int, num_bytes: int) -> None:
        for _ in range(_MAX_TRIES):
            try:
                change(self._faults, start, num_bytes)
                return
            except BlockingIOError:
                self._serve()  # mappings are being changed; who changes them waits to be heard
        raise OSError(errno.EAGAIN, f"memory at {start:#x} does not come to rest")

    def _read(self, moves: list[tuple[int, int, int]]) -> None:
        for at in range(0, len(moves), _MAX_PIECES):
            some = moves[at : at + _MAX_PIECES]
            pieces = array.array("Q", [number for start, size, _ in some for number in (start, size)])
            rooms = array.array("Q", [number for _, size, place in some for number in (self._copy_start + place, size)])
            wanted = sum(size for _, size, _ in some)
            if (found := read_process(self._pid, pieces, rooms)) != wanted:
                raise OSError(errno.EFAULT, f"reading {wanted} bytes of process {self._pid}: found {found}")


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
            job = _CopyJob(pid, faults, copy, told["runs"], told["moves"])
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
