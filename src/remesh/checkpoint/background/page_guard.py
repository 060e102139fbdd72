"""How is memory copied without waiting for the copy? Its pages are write-protected, and another process copies them.

    copy      pages of the tensors are protected (userfaultfd), which takes microseconds for huge pages: `page_copier`
              does it, and answers; from here on the program goes on
    (behind)  it copies block by block; a thread that writes to a page which is not copied yet waits for its block
    wait      all is copied; the memory is made of huge pages where it is not, so that the next time is fast

So a copy has the values of the call, whatever is changed after it, and nothing is protected for longer than a copy
takes. This holds for every write that goes through the page tables of this process: private memory, written by its
threads or by the system for them. It does not hold for memory that others write to, which is never taken here: files
and shared memory, and pinned memory, into which devices write. The system must allow it: Linux 6.4, and a process that
may handle the faults of the system (root, CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd = 1).
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remesh.checkpoint.background import page_copier
from remesh.checkpoint.errors import CheckpointingException
from remesh.foundation.linux import calls, userfault
from remesh.foundation.linux.proc_text import AreaKind
from remesh.foundation.linux.procfs import read_areas
from remesh.foundation.linux.userfault import Feature

logger = logging.getLogger(__name__)

LEAST_BYTES = 256 << 10
"""A smaller tensor is copied sooner than protected."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_EVENTS = Feature.EVENT_REMAP | Feature.EVENT_REMOVE | Feature.EVENT_UNMAP
_ENDING_S = 10.0
_SOURCE = os.fspath(Path(__file__).resolve().parents[3])
"""The folder that holds the package."""


class Move(NamedTuple):
    """Bytes to be copied."""

    start: int
    """Address."""
    num_bytes: int
    place: int
    """First byte in the copy."""


class Refused(Exception):
    """The system, or the memory, does not allow it; nothing is protected."""


class GuardedCopy:
    """A copy that is being made. It keeps the tensors, whose memory must not go before it is copied."""

    def __init__(self, copier: PageCopier, number: int, tensors: Sequence[torch.Tensor], runs: _Ranges) -> None:
        self._copier = copier
        self._number = number
        self._tensors = tensors
        self._runs = runs

    def wait(self) -> None:
        """Return when all is copied; `CheckpointingException` when it is not as it was. From any thread."""
        try:
            self._copier.wait_for(self._number)
        finally:
            tensors, self._tensors = self._tensors, ()
        if tensors:
            for start, stop in self._runs:
                _collapse(start, stop)


class PageCopier:
    """The process that copies, started when it is needed first. Safe to use from several threads.

    A fork of this process has none and starts its own; copies that were begun before are the parent's alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._num_begun = 0
        self._num_done = 0
        self._failed: dict[int, str] = {}
        """Why a copy that nobody has waited for was not made, by its number."""
        _copiers.add(self)

    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[int], descriptor: int) -> GuardedCopy:
        """Begin to copy tensors of which `select` said that it can be done, into the file of a descriptor.

        `Refused` where the system does not allow it: then nothing is copied, and nothing protected.
        Copies are made one after the other: it waits for the one before.
        """
        moves = [Move(one.data_ptr(), one.nbytes, place) for one, place in zip(tensors, places, strict=True)]
        runs = _runs_of(tensors)
        with self._lock:
            process = self._present()
            faults = _new_userfaultfd()
            try:
                process.begin(faults, descriptor, {"runs": runs, "moves": moves})
            except OSError as raised:
                raise Refused(f"the copying process is gone ({raised})") from raised
            finally:
                os.close(faults)  # the copying process holds the only one
            answer = process.hear()
            if answer != "protected":
                raise Refused(answer)
            self._num_begun += 1
            return GuardedCopy(self, self._num_begun, tensors, runs)

    def wait_for(self, number: int) -> None:
        """Return when the copy of that number, counted from 1, is made."""
        with self._lock:
            self._hear_until(number)
            failed = self._failed.pop(number, None)
        if failed is not None:
            raise CheckpointingException(
                "copying tensors for a background save: expected the program to keep their memory until it is "
                "copied, found "
                f"{failed}; the save does not exist, save again, with snapshots='copy' if this comes again"
            )

    def _present(self) -> _Process:
        """The process, at rest."""
        self._hear_until(self._num_begun)
        if self._process is None or self._process.is_gone:
            self._process = _Process()
        return self._process

    def _hear_until(self, number: int) -> None:
        while self._num_done < number:
            assert self._process is not None
            self._num_done += 1
            if (answer := self._process.hear()) != "copied":
                self._failed[self._num_done] = answer

    def _begin_anew(self) -> None:
        """Be that of a fork, in which another thread's lock is never released."""
        self._lock = threading.Lock()
        lost = range(self._num_done + 1, self._num_begun + 1)
        self._failed |= dict.fromkeys(lost, "that this process is a fork of the one that asked for the copy")
        self._num_done = self._num_begun
        if self._process is not None:
            self._process.forget()
            self._process = None


_copiers: weakref.WeakSet[PageCopier] = weakref.WeakSet()


def _begin_all_anew() -> None:
    for copier in _copiers:
        copier._begin_anew()


os.register_at_fork(after_in_child=_begin_all_anew)


class _Process:
    """The running process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-S", "-P", "-m", page_copier.__name__, str(theirs.fileno()), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": _SOURCE}
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        # Where only ancestors may look into a process, it allows this one to; elsewhere there is nothing to allow.
        with contextlib.suppress(OSError):
            calls.prctl(calls.PR_SET_PTRACER, process.pid)
        self._socket = ours
        self._heard = b""
        self._ending = weakref.finalize(self, _end, ours, process)

    @property
    def is_gone(self) -> bool:
        return not self._ending.alive

    def forget(self) -> None:
        """Leave it to the parent of this fork: it ends when nobody holds this end of the socket any more."""
        self._ending.detach()
        self._socket.close()

    def begin(self, faults: int, copy: int, job: dict[str, Any]) -> None:
        body = json.dumps(job).encode()
        message = page_copier.HEAD.pack(len(body)) + body
        sent = socket.send_fds(self._socket, [message], [faults, copy])  # whole, so that it wakes up once
        self._socket.sendall(message[sent:])

    def hear(self) -> str:
        """Receive the answer of the copying process; its death counts as an answer."""
        if not self.is_gone:
            with contextlib.suppress(OSError):
                while b"\n" not in self._heard and (more := self._socket.recv(4096)):
                    self._heard += more
            line, is_whole, self._heard = self._heard.partition(b"\n")
            if is_whole:
                return str(json.loads(line))
            self._ending()
        return "failed: the copying process has ended"


def _end(end: socket.socket, process: subprocess.Popen[bytes]) -> None:
    end.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S)
        return
    process.kill()
    process.wait()


_Ranges = list[tuple[int, int]]


def select(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of those that can be copied this way, and are worth it: large, in one piece of private memory."""
    large = [number for number, tensor in enumerate(tensors) if tensor.nbytes >= LEAST_BYTES and _is_in_a_piece(tensor)]
    if not large:
        return []
    private = _private_memory()
    return [number for number in large if _is_within(private, *_pages_of(tensors[number]))]


def _private_memory() -> _Ranges:
    """The memory that is anonymous and of this process alone; neighbouring areas count as one range."""
    ranges: _Ranges = []
    for area in read_areas(os.getpid()):
        if area.kind is AreaKind.ANONYMOUS and area.protection in ("rw-p", "rwxp"):
            _join(ranges, area.start, area.end)
    return ranges


def _is_within(ranges: _Ranges, start: int, stop: int) -> bool:
    """Whether one of the ranges, which are in order, holds all of another."""
    at = bisect.bisect_right(ranges, start, key=itemgetter(0)) - 1
    return at >= 0 and stop <= ranges[at][1]


def _is_in_a_piece(tensor: torch.Tensor) -> bool:
    """Whether its elements are a range of memory of this process alone, as far as torch knows."""
    is_plain = tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if not is_plain or not tensor.is_contiguous() or tensor.untyped_storage().is_shared():
        return False
    return not (torch.cuda.is_available() and tensor.is_pinned())


def _pages_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start // _PAGE_BYTES * _PAGE_BYTES, -(-(start + tensor.nbytes) // _PAGE_BYTES) * _PAGE_BYTES


def _runs_of(tensors: Iterable[torch.Tensor]) -> _Ranges:
    """The pages in which the tensors lie, in order; neighbours are one run."""
    runs: _Ranges = []
    for pages in sorted(map(_pages_of, tensors)):
        _join(runs, *pages)
    return runs


def _join(ranges: _Ranges, start: int, stop: int) -> None:
    """Append a range that begins no earlier than the last."""
    if ranges and start <= ranges[-1][1]:
        ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
    else:
        ranges.append((start, stop))


def _new_userfaultfd() -> int:
    try:
        descriptor = userfault.make(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as raised:
        raise Refused(f"userfaultfd: {raised.strerror}") from raised
    try:
        userfault.enable(descriptor, Feature.PAGEFAULT_FLAG_WP | Feature.WP_UNPOPULATED | _EVENTS)
    except OSError as raised:
        os.close(descriptor)
        raise Refused(f"userfaultfd: {raised.strerror}, expected Linux 6.4") from raised
    return descriptor


def _collapse(start: int, stop: int) -> None:
    """Let memory be huge pages where it can be. A kernel may refuse."""
    huge = page_copier.BLOCK_BYTES
    start, stop = -(-start // huge) * huge, stop // huge * huge
    if start < stop:
        with contextlib.suppress(OSError):
            calls.madvise(start, stop - start, calls.MADV_COLLAPSE)
