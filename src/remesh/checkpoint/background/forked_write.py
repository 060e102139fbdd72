"""How is a snapshot taken without a copy? By a fork: the child's memory is that of the process as it was.

    async_save    everything but large elements is put together; then the process forks, and goes on
    (child)       waits for the word; writes the recorded file, of which the large elements are where they always were
    (worker)      gives the word, waits, lets the memory that was shared be one piece again
    dropped       the child sees the end of the pipe, and ends

The system copies a page when one of the two writes to it, so the time that training is blocked is that of copying page
tables: 6 ms for 256 MiB in pages of 4 KiB, next to nothing in pages of 2 MiB, into which the memory is collapsed after
a write. What it costs is paid by a program that changes its state while it is being written: about five times what a
copy takes, for every page once. So this is for states that rest while they are written.

The child of a process with threads may do little. This one calls no torch, no collective and no logger; it writes bytes
that are there, computes checksums, and leaves without running anybody's destructors. It holds no other descriptor open.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from remesh.checkpoint.errors import CheckpointingException
from remesh.checkpoint.storage import Location
from remesh.checkpoint.storage.data_file import BLOCK_BYTES, DataFile
from remesh.checksums import crc32

_LARGE_BYTES = 256 << 10
"""Elements from this size on are not copied."""
_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25

_Blob = tuple[bytes, memoryview, Callable[[int], bytes]]


class RecordedFile:
    """A data file to be written later. Large elements are remembered by their place, everything else is copied."""

    def __init__(self) -> None:
        self._entries: list[bytearray | _Blob] = []
        self._num_bytes = 0

    def tell(self) -> int:
        """Number of bytes so far."""
        return self._num_bytes

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes; returns their number."""
        if not self._entries or not isinstance(self._entries[-1], bytearray):
            self._entries.append(bytearray())
        last = self._entries[-1]
        assert isinstance(last, bytearray)
        last += content
        self._num_bytes += len(content)
        return len(content)

    def write_blob(self, head: bytes, elements: memoryview, tail: Callable[[int], bytes]) -> None:
        """Append a blob whose tail depends on the CRC-32 of its elements."""
        if len(elements) < _LARGE_BYTES:
            for part in (head, elements, tail(crc32(elements))):
                self.write(part)
            return
        self._entries.append((head, elements, tail))
        self._num_bytes += len(head) + len(elements) + len(tail(0))

    def align(self, num_bytes: int) -> None:
        """Fill up, so that what follows after ``num_bytes`` more begins on a boundary of blocks."""
        self.write(bytes(-(self._num_bytes + num_bytes) % BLOCK_BYTES))

    def flush(self) -> None:
        """Nothing is waiting."""

    def play(self, file: DataFile, progress: Callable[[int], None]) -> None:
        """Write all of it."""
        for entry in self._entries:
            if isinstance(entry, bytearray):
                file.write(memoryview(entry))
            else:
                file.write_blob(*entry)
            progress(file.tell())

    def large(self) -> list[memoryview]:
        """The elements that are not copied."""
        return [entry[1] for entry in self._entries if not isinstance(entry, bytearray)]


_Files = Sequence[tuple[Path, RecordedFile]]


class ForkedWrite:
    """A child that has the values of this moment and waits to write them. To be called once, from any thread."""

    def __init__(self, recorded: Mapping[Location, RecordedFile], *, with_sha256: bool = False) -> None:
        files: list[tuple[Path, RecordedFile]] = []
        for path, record in recorded.items():
            if not isinstance(path, Path):
                raise CheckpointingException(
                    f"saving {path} from a fork: expected a place of this machine's file systems, found a URL, whose "
                    "client has threads; take snapshots by copying"
                )
            files.append((path, record))
        self.num_bytes = sum(record.tell() for _, record in files)
        self._paths = ", ".join(str(path) for path, _ in files)
        self._large = [memory for _, record in files for memory in record.large()]
        word_in, self._word = os.pipe()
        self._answers, answer_out = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; see above
            self._child = os.fork()
        if self._child == 0:
            _be_the_child(files, word_in, answer_out, with_sha256)
        os.close(word_in)
        os.close(answer_out)
        self._ending = weakref.finalize(self, _end, self._child, self._word, self._answers)

    def __call__(self, *, progress: Callable[[int], None] = lambda num_bytes: None) -> dict[str, str]:
        """Let it write, and wait; returns the SHA-256 of each file by its name, if that was asked for."""
        os.write(self._word, b"\n")
        said: dict[str, Any] = {}
        with os.fdopen(os.dup(self._answers)) as answers:
            for line in answers:
                said = json.loads(line)
                if "written" in said:
                    progress(said["written"])
        self._ending()
        large, self._large = self._large, []
        if "sums" not in said:
            raise CheckpointingException(
                f"writing {self._paths} in a child of this process: expected all to be written, found "
                f"{said.get('failed', 'that the child ended before')}; the previous checkpoint is as it was"
            )
        for memory in large:
            _collapse(memory)
        return dict(said["sums"])

    def __reduce__(self) -> NoReturn:
        raise TypeError("a write that a child of this process waits to do cannot be sent to another; use a thread")


def _be_the_child(files: _Files, word_in: int, answer_out: int, with_sha256: bool) -> NoReturn:
    try:
        gc.disable()  # nothing that others have made is to be finalized here
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the training loop
        _close_all_but(word_in, answer_out)
        if os.read(word_in, 1):
            _write(files, answer_out, with_sha256)
    finally:
        os._exit(0)


def _write(files: _Files, answer_out: int, with_sha256: bool) -> None:
    def say(**what: Any) -> None:
        os.write(answer_out, json.dumps(what).encode() + b"\n")

    def say_written(before: int, num_bytes: int) -> None:
        say(written=before + num_bytes)

    try:
        sums: dict[str, str] = {}
        done_bytes = 0
        for path, recorded in files:
            hasher = hashlib.sha256() if with_sha256 else None
            with DataFile(path, hasher) as file:
                recorded.play(file, partial(say_written, done_bytes))
                file.finish()
            done_bytes += recorded.tell()
            if hasher is not None:
                sums[path.name] = hasher.hexdigest()
        say(sums=sums)
    except BaseException as raised:  # told by the parent
        say(failed=f"{type(raised).__name__}: {raised}")


def _close_all_but(*kept: int) -> None:
    """Others see the end of their connections when the parent closes them, not when this child ends."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _end(child: int, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)  # it has answered, or sees that nobody will ever ask


def _collapse(memory: memoryview) -> None:
    """Let memory be huge pages where it can be, so that the next fork has little to copy. A kernel may refuse."""
    array = np.frombuffer(memory, np.uint8)
    start = -(-array.ctypes.data // _HUGE_BYTES) * _HUGE_BYTES
    num_bytes = (array.ctypes.data + array.nbytes) // _HUGE_BYTES * _HUGE_BYTES - start
    if num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_COLLAPSE)
