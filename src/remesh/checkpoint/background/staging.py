"""Buffers for the copies of background saves: they are used again, and another process can see them.

Memory that a process touches for the first time costs several times as much as copying into it. So a buffer that has
been written to disk is kept for the next save; at most one idle buffer is kept. Buffers are anonymous files in memory:
a writer in another process maps them, nothing has a name, and the system frees them with the last process that has
them open.

Copies of tensors on a device are queued there (`queued_copies`): they are made when `Copies.wait` returns, and have the
values of the call. A buffer that took some stays locked for the next.

With a cap, a save waits until the copies of earlier ones have been written. That needs nothing of other ranks: their
writers, and ours, go on meanwhile. A buffer whose save never comes to be written is counted until it is forgotten.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError, as_checkpoint_errors
from remesh.device.queued_copies import CUDA, Devices, LockedMemory, QueuedCopy

_ALIGNMENT_BYTES = 64
_ROOM_TIMEOUT_S = 1800.0
_COPYING = "copying tensors of a device for a save"


class Buffer:
    """Memory that processes can share: bytes, and the descriptor of the anonymous file they are in."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("remesh-staging")
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, max(1, num_bytes))
        self.lease: weakref.finalize[..., Buffer] | None = None
        """What is to happen when it is forgotten while in use."""
        self.locked: LockedMemory | None = None
        """The same memory, once devices have copied into it."""
        self.raw = torch.frombuffer(mmap.mmap(self.descriptor, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of some tensors, on the CPU."""

    tensors: list[torch.Tensor]
    """Row-major, in order; they share the memory of the buffer."""
    buffer: Buffer | None
    """None in another process than the one that copied."""
    queued: LockedMemory | None = None
    """What devices are still copying, if anything."""

    def wait(self) -> Copies:
        """The same, when all of them are there; `CheckpointingException` when one cannot be. From any thread."""
        if self.queued is not None:
            with as_checkpoint_errors(_COPYING):
                self.queued.wait()
        return Copies(self.tensors, self.buffer)


class StagingBuffers:
    """Makes copies of tensors, and takes back their memory. Safe to use from several threads."""

    def __init__(self, max_bytes: int | None = None, *, devices: Devices = CUDA) -> None:
        self._max_bytes = max_bytes
        self._devices = devices
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition(threading.RLock())  # a buffer may be forgotten while the lock is held
        self._idle: Buffer | None = None
        self._used_bytes = 0

    def __deepcopy__(self, memo: object) -> StagingBuffers:
        """A new one with the same options, for a copy of the object that keeps it."""
        return StagingBuffers(self._max_bytes, devices=self._devices)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers whose copies are not written yet."""
        with self._mine():
            return self._used_bytes

    def copy(self, tensors: Sequence[torch.Tensor]) -> Copies:
        """Copies that no other code changes. Waits while the cap leaves no room for them.

        `CheckpointMismatchError` for a quantized tensor.
        """
        starts, num_bytes = [], 0
        for tensor in tensors:
            if tensor.is_quantized:
                raise CheckpointMismatchError(
                    f"copying tensors for a background save: one of shape {tuple(tensor.shape)} is quantized "
                    f"({tensor.dtype}), expected plain numbers, since torch cannot copy it into staging memory; "
                    "save without background, or give int_repr() with its scale and zero point"
                )
            starts.append(num_bytes)
            num_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer = self._take(num_bytes)
        copies = [
            buffer.raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        try:
            queued, done = self._queue(tensors, copies, buffer)
        except CheckpointingException:
            self.give_back(Copies(copies, buffer))
            raise
        for number, (copy, tensor) in enumerate(zip(copies, tensors, strict=True)):
            if number not in done:
                copy.copy_(tensor)
        return Copies(copies, buffer, queued)

    def _queue(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], buffer: Buffer
    ) -> tuple[LockedMemory | None, set[int]]:
        """Let devices copy what they hold; the numbers of those tensors."""
        on_devices = {
            number
            for number, tensor in enumerate(tensors)
            if tensor.nbytes and self._devices.device_of(tensor) is not None
        }
        if not on_devices:
            return None, on_devices
        with as_checkpoint_errors(_COPYING):
            if buffer.locked is None:
                buffer.locked = LockedMemory(buffer.raw, self._devices)
            buffer.locked.begin([QueuedCopy(copies[number], tensors[number]) for number in sorted(on_devices)])
        return buffer.locked, on_devices

    def give_back(self, copies: Copies) -> None:
        """Let the memory be used again, once nothing is on its way there; the copies are lost."""
        buffer = copies.buffer
        is_free = buffer is None or buffer.locked is None or buffer.locked.is_free()
        with self._mine():
            lease = None if buffer is None or buffer.lease is None else buffer.lease.detach()
            if buffer is None or lease is None or not self._leave(*lease[2]):
                return  # given back already
            if is_free and (self._idle is None or self._idle.num_bytes < buffer.num_bytes):
                self._idle = buffer

    def release(self) -> None:
        """Free the idle buffer."""
        with self._mine():
            self._idle = None

    def _take(self, num_bytes: int) -> Buffer:
        with self._mine():
            self._wait_for(num_bytes)
            idle, self._idle = self._idle, None
            fits = idle is not None and num_bytes <= idle.num_bytes <= 2 * num_bytes
            buffer = idle if fits and idle is not None else Buffer(num_bytes)
            self._used_bytes += buffer.num_bytes
            buffer.lease = weakref.finalize(buffer, self._leave, buffer.num_bytes, self._changed)
            return buffer

    def _wait_for(self, num_bytes: int) -> None:
        if self._max_bytes is None:
            return
        if num_bytes > self._max_bytes:
            raise CheckpointingException(
                f"copying tensors for a background save: they have {num_bytes} bytes, expected at most "
                f"{self._max_bytes} (max_staged_bytes); raise the cap, or save synchronously"
            )
        limit = self._max_bytes - num_bytes
        if not self._changed.wait_for(lambda: self._used_bytes <= limit, _ROOM_TIMEOUT_S):
            raise CheckpointingException(
                f"copying tensors for a background save: {self._used_bytes} bytes of earlier saves are still not "
                f"written after {_ROOM_TIMEOUT_S:.0f} s, expected at most {limit} to make room for {num_bytes}; "
                "schedule the requests that save returns, or raise max_staged_bytes"
            )

    def _mine(self) -> threading.Condition:
        """The lock. A fork has none of the buffers: the parent goes on to write into them, and to files from them."""
        if self._process != os.getpid():
            self._begin_anew()
        return self._changed

    def _leave(self, num_bytes: int, lock: threading.Condition) -> bool:
        """Count a buffer no more that was taken under this lock; False for one of the parent of a fork."""
        if lock is not self._changed or self._process != os.getpid():
            return False
        with lock:
            self._used_bytes -= num_bytes
            lock.notify_all()
            return True
