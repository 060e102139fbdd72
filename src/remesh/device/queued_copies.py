"""Device-to-host copies queued on a stream, with an event at the end, so that a save does not block the host.

    program's stream   kernels ──┐ begin            ┌──> what the program queues after the save
    copying stream               └──> copies ──> end┤
    writer (a thread)                               └──> writes

1. The copying stream waits for the program's stream: the save has what was queued there before it.
2. The memory of each tensor is kept for the copying stream. torch's allocator gives it to no other tensor before the
   copies are made, no matter when the program frees the tensor or on which stream it was allocated.
3. The copies go into memory whose pages are locked. Into other memory they would not be queued: the host would make
   them, and wait.
4. The program's stream waits for the end. So nothing that is queued after the save, in place or not, is in it. The host
   waits for nothing; the device does what other streams give it meanwhile.
5. The writer waits for the end, and so does the code that gives the memory to another save or back to the system.

A save is thus an operation on the current stream, like any other of torch. What a program does on streams of its own is
in order with a save if it is in order with the current stream.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from remesh.foundation.errors import DeviceError

_FAULTS = (RuntimeError, OSError, MemoryError)
"""What torch and the driver raise."""
_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable"""


class QueuedCopy(NamedTuple):
    """Values to be copied to the host."""

    into: torch.Tensor
    """In memory whose pages are locked; row-major."""
    tensor: torch.Tensor
    """On the device, of any strides."""


class Devices:
    """The CUDA devices of this process; none is touched before a tensor of it comes.

    RuntimeError from any method means that nothing can be relied on.
    """

    def device_of(self, tensor: torch.Tensor) -> Any:
        """The device that holds it; None for memory that the host copies by itself."""
        return tensor.device if tensor.is_cuda else None

    def current_stream(self, device: Any) -> Any:
        """Where the program queues its work now."""
        return torch.cuda.current_stream(device)

    def copying_stream(self, device: Any) -> Any:
        """Another one, for copies alone; always the same."""
        return _copying_stream(device)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's memory from being used again before all that the stream will have been given is done."""
        tensor.record_stream(stream)

    def queue(self, copies: Sequence[QueuedCopy], stream: Any) -> None:
        """Let the stream copy; the host does not wait."""
        with torch.cuda.stream(stream), torch.no_grad():
            for into, tensor in copies:
                # On the device: of a queued copy torch would conjugate or negate what is on the host before it arrives.
                into.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)

    def lock(self, raw: torch.Tensor) -> None:
        """Lock the pages of bytes of the host, so that devices can copy into them.

        Where they lie, and not out of torch's locked memory: copies lie in files in memory, which other processes map.
        """
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _check(driver.cudaHostRegister(raw.data_ptr(), raw.nbytes, _FOR_ALL_DEVICES))

    def unlock(self, raw: torch.Tensor) -> None:
        """Undo it."""
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _check(driver.cudaHostUnregister(raw.data_ptr()))


CUDA = Devices()


class LockedMemory:
    """Memory of the host that devices copy into. It is kept until nothing is on its way there any more.

    One thread begins copies, the next ones when those before have been waited for; any thread may wait.
    """

    def __init__(self, raw: torch.Tensor, devices: Devices) -> None:
        """Lock the pages of ``raw``; `DeviceError` when the system or the driver refuses."""
        self._devices = devices
        self._num_bytes = raw.nbytes
        self._ends: list[Any] = []
        """Behind the copies that were begun last, one for each device."""
        self._loss: DeviceError | None = None
        """Why what was begun will never be there."""
        try:
            devices.lock(raw)
        except _FAULTS as raised:
            raise DeviceError(
                f"copying tensors of a device for a save: expected to lock {raw.nbytes} bytes of the host into memory, "
                f"found {raised}; free memory of the host, let saves hold fewer bytes (max_staged_bytes), or save "
                "without background"
            ) from raised
        weakref.finalize(self, _unlock, devices, raw, self._ends).atexit = False  # the process takes its memory along

    def begin(self, copies: Iterable[QueuedCopy]) -> None:
        """Queue copies into this memory; returns at once. `DeviceError` when the device refuses."""
        self._ends.clear()
        by_device: defaultdict[Hashable, list[QueuedCopy]] = defaultdict(list)
        for copy in copies:
            by_device[self._devices.device_of(copy.tensor)].append(copy)
        try:
            for device, of_device in by_device.items():
                self._begin_on(device, of_device)
        except _FAULTS as raised:
            raise self._lost(raised) from raised

    def wait(self) -> None:
        """Return when all that was begun is there; `DeviceError` when it never will be. From any thread."""
        if self._loss is not None:
            raise self._loss
        for end in tuple(self._ends):
            try:
                end.synchronize()
            except _FAULTS as raised:
                raise self._lost(raised) from raised

    def is_free(self) -> bool:
        """Wait; whether other copies may be begun. What a device did not finish it may have left half done."""
        with contextlib.suppress(DeviceError):
            self.wait()
        return self._loss is None

    def _begin_on(self, device: Hashable, copies: Sequence[QueuedCopy]) -> None:
        program, copying = self._devices.current_stream(device), self._devices.copying_stream(device)
        copying.wait_event(program.record_event())
        try:
            for copy in copies:
                self._devices.keep(copy.tensor, copying)
            self._devices.queue(copies, copying)
        finally:
            # Also behind copies of which the last could not be queued: those before it are on their way.
            end = copying.record_event()
            self._ends.append(end)
            program.wait_event(end)

    def _lost(self, raised: BaseException) -> DeviceError:
        self._loss = DeviceError(
            f"copying tensors of a device for a save: expected {self._num_bytes} bytes of them on the host, found: "
            f"{raised}; the save does not exist; save again, in a new process if the device is lost"
        )
        return self._loss


def _unlock(devices: Devices, raw: torch.Tensor, ends: Sequence[Any]) -> None:
    """Give memory back to the system, behind the last copy into it. A device that is lost copies nothing any more."""
    for end in ends:
        with contextlib.suppress(*_FAULTS):
            end.synchronize()
    with contextlib.suppress(*_FAULTS):
        devices.unlock(raw)


def _check(answer: Any) -> None:
    """Raise what the driver answered, unless that was well.

    CUDA keeps the error of a call for the next query in this thread, and that is torch's after its next kernel: the
    program would get it a second time, from a kernel that has nothing to do with it. So one that does nothing asks.
    """
    try:
        torch.cuda.check_error(int(answer))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.empty(1, dtype=torch.uint8, device="cuda").fill_(0)
        raise


@cache
def _copying_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
