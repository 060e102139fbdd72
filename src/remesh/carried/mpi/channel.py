"""The channel between the two halves of a rank: one file, mapped by both, with futexes to wait on.

Layout, little-endian, offsets in bytes. Words that one side writes stand on cache lines of their own::

    0       magic, version                         written once by the lower half
    64      doorbell         u32   raised by the upper half with every request (and by others that wake the lower half)
    68      core             u32   on which the upper half ran when it rang last, plus 1; 0: not told
    72      calls without    u32   calls for which neither half gives way; the upper half counts them down
    76      used slots       u32   bit i: slot i is or was a thread's; the upper half's to set, before a call
                                   there; 0: not told
    128     lower sleeps     u32   1: the lower half is, or is about to be, in a futex wait at the doorbell;
                                   2: it gives way on the upper half's core, and runs when that does the same
    192     spin             u32   turns that the upper half spins before it sleeps; the lower half's to set
    196     give way         u32   us that the upper half then gives way before it sleeps; the lower half's to set
    256     gate             u32   bit 0: closed; above it: how many threads are in files that other ranks have open
    320     program          u32   id of the process whose channel this is, as it sees it; the lower half's to set, once
                                   it has started the process, which waits for it
    384     opened           u32   1: a library of that process has the channel; the upper half's to set
    65536 + i * 65536              slot i, one for each thread of the upper half that makes calls
      0     request number   u32   raised by the upper half when the body is complete
      64    reply number     u32   set to the request number by the lower half when the body is the reply
      128   upper waits      u32   the upper half is, or is about to be, in a futex wait at the reply number
      192   posted           u32   bytes of entries that the upper half has put into the ring, ever
      256   taken            u32   bytes of entries that the lower half has taken out of it, ever
      320   body                   request, then reply
      49152 ring                   calls without a reply, one after another: u32 bytes of the entry with padding to 8,
                                   then the call; SKIP where the rest up to the ring's end is empty

A request whose number differs from the reply's is unanswered. It keeps its body, so another lower half can serve it;
the same is true of what stands in the rings. All rings are served before any body, so a call never overtakes what the
program had posted before it, in whatever thread.

The gate keeps images from being taken while a thread is in a file that other ranks have open, and threads from going in
between the images of two ranks::

    thread of the program                                lower half
    closed? no: one more inside     (one instruction)
        system calls on the file                         close: from here on the number only falls
    one less inside                                      nobody inside: quiet, and stays so; an image may be taken
    closed? yes: a call, which is not answered           open, then answer
        when closed; then once more

Both change the one word by atomic instructions only. So either a thread went in before the gate was closed, and is
counted; or it finds the gate closed. A program that is stopped has its say in the word at any instruction, and an image
has nobody inside.
"""

from __future__ import annotations

import os
import struct
from typing import Self

from remesh.carried.mpi.calls.words import (
    BODY,
    FIRST_SLOT,
    GATE,
    NUM_SLOTS,
    PROGRAM,
    REPLY,
    RING,
    SPIN,
    STRIDE,
    WAITING,
)
from remesh.carried.mpi.native import NATIVE
from remesh.foundation.errors import FormatError, StorageError

_MAGIC = b"RMSHCHN3"


class SharedChannel:
    """A mapped file of :data:`SIZE_BYTES` bytes; no descriptor stays open. ``bodies[i]`` is slot i's body."""

    SIZE_BYTES = FIRST_SLOT + NUM_SLOTS * STRIDE

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._base: int = NATIVE.address_of(view)
        self.bodies = tuple(view[start + BODY : start + RING] for start in range(FIRST_SLOT, self.SIZE_BYTES, STRIDE))
        self._words = tuple(self._words_of(slot) for slot in range(NUM_SLOTS))
        self._scan = (self._base + FIRST_SLOT, REPLY, STRIDE, NUM_SLOTS)
        self._pace_words = view[SPIN : SPIN + 8].cast("I")
        self._program_word = view[PROGRAM : PROGRAM + 4].cast("I")
        self._gate_word = view[GATE : GATE + 4].cast("I")

    def _words_of(self, slot: int) -> tuple[int, int, int]:
        start = self._base + FIRST_SLOT + slot * STRIDE
        return start, start + REPLY, start + WAITING

    @classmethod
    def create(cls, path: str) -> Self:
        """Make the file (zeros, mode 0600; never an existing one) and map it. The lower half does this."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, cls.SIZE_BYTES)
                os.pwrite(descriptor, _MAGIC, 0)
            finally:
                os.close(descriptor)
            return cls(NATIVE.map_file(path, cls.SIZE_BYTES))
        except OSError as error:
            raise StorageError(
                f"making the channel {path}: {error}; give a new name in a folder with {cls.SIZE_BYTES} bytes free"
            ) from error

    @classmethod
    def map(cls, path: str) -> Self:
        """Map an existing file. The upper half does this.

        Raises:
            StorageError: it cannot be opened or is too short.
            FormatError: it is no channel of this version.
        """
        try:
            view = NATIVE.map_file(path, cls.SIZE_BYTES)
        except OSError as error:
            raise StorageError(f"opening the channel {path}: {error}; start the program by `remesh mpi run`") from error
        channel = cls(view)
        channel.check(f"opening the channel {path}")
        return channel

    def check(self, doing: str) -> None:
        """Raise `FormatError` unless this is a channel of this version; what stands in it may be of an image."""
        found = bytes(self._view[: len(_MAGIC)])
        if found != _MAGIC:
            raise FormatError(
                "foreign", f"{doing}: the channel begins with {found!r}, expected {_MAGIC!r}; use one version of Remesh"
            )

    def close_gate(self) -> None:
        """Keep every thread of the program out of files from now on; those that are inside finish."""
        NATIVE.close_gate(self._base + GATE)

    def open_gate(self) -> None:
        """Let threads into files again; those that wait must be answered after that."""
        NATIVE.open_gate(self._base + GATE)

    @property
    def num_in_files(self) -> int:
        """The number of threads inside the gate."""
        return self._gate_word[0] >> 1

    def forget_program(self) -> None:
        """Reset the gate after the end of the program: no thread of it is in a file any more, wherever it ended."""
        self._gate_word[0] &= 1

    @property
    def base(self) -> int:
        """The address at which the mapping begins."""
        return self._base

    def pending(self) -> int:
        """Bit i is set where slot i holds a request without a reply."""
        return int(NATIVE.pending(*self._scan))

    def answer(self, slot: int) -> None:
        """Hand over the reply in the slot's body."""
        NATIVE.answer(*self._words[slot])

    def request_number(self, slot: int) -> int:
        """Number of the slot's latest request."""
        start = FIRST_SLOT + slot * STRIDE
        return int(struct.unpack_from("<I", self._view, start)[0])

    def set_pace(self, spin: int, give_way_us: int) -> None:
        """Set how the upper half waits for a reply before it sleeps: so many turns, then so long."""
        self._pace_words[0], self._pace_words[1] = spin, give_way_us

    def set_program(self, pid: int) -> None:
        """Set the program that owns the channel: none that it starts may take the channel for its own."""
        self._program_word[0] = pid


class RemoteMemory:
    """The memory of another process, by its addresses; needs the rights to trace it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, address: int, num_bytes: int) -> bytearray:
        """Return a copy of the bytes. OSError if the process has ended or nothing is mapped there."""
        copy = bytearray(num_bytes)
        if num_bytes:
            NATIVE.read_memory(self._pid, address, NATIVE.address_of(copy), num_bytes)
        return copy

    def read_into(self, address: int, view: memoryview) -> None:
        """Read bytes from ``address`` on, as many as the view has. OSError as :meth:`read`."""
        if len(view):
            NATIVE.read_memory(self._pid, address, NATIVE.address_of(view), len(view))

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes there. OSError if the process has ended or nothing is mapped there."""
        num_bytes = len(data)
        if num_bytes:
            NATIVE.write_memory(self._pid, address, NATIVE.address_of(data), num_bytes)
