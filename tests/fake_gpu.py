"""Fake GPU: streams that are late, an allocator that hands memory on at once, and locked pages.

Its memory is the host's, so that a test reads what the device would have written. What is queued is done when it
pleases the device: streams go on at random, some much later than others, and only an event holds one back. The
allocator does as torch's: memory that was freed belongs to the stream that it was allocated on, which may write there
at once, unless it was kept for another stream. A copy to the host lands when the stream gets to it, or never: the
device can be lost.

What no program may do is listed by name in ``faults``: a copy into pages that are not locked, or that were unlocked
while it was under way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from remesh.device.queued_copies import Devices


class LateEvent:
    """A place in a stream of the device."""

    def __init__(self, device: MakeBelieveDevice) -> None:
        self._device = device
        self.is_reached = False

    def synchronize(self) -> None:
        """Let the device work, whatever it likes first, until it has come here."""
        self._device.work_until(lambda: self.is_reached)


class LateStream:
    """A queue of work. ``haste`` says how likely it is to go on, against other streams."""

    def __init__(self, device: MakeBelieveDevice, haste: float) -> None:
        self._device = device
        self.haste = haste
        self.work: deque[Callable[[], object] | LateEvent | tuple[LateEvent]] = deque()
        """What to do, an event to wait for, or one, in a tuple, that is reached."""

    def record_event(self) -> LateEvent:
        event = LateEvent(self._device)
        self.work.append((event,))
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.work.append(event)

    def run(self, kernel: Callable[[], object]) -> None:
        """Queue some work."""
        self.work.append(kernel)

    def can_go_on(self) -> bool:
        return bool(self.work) and not (isinstance(self.work[0], LateEvent) and not self.work[0].is_reached)

    def go_on(self) -> None:
        """Do what is next."""
        match self.work.popleft():
            case (event,):
                event.is_reached = True
            case LateEvent():
                pass
            case kernel:
                kernel()


class _DeviceMemory:
    """Memory of the device."""

    def __init__(self, owner: LateStream, num_bytes: int) -> None:
        self.owner = owner
        self.raw = torch.zeros(num_bytes, dtype=torch.uint8)
        self.kept_for: list[LateStream] = []


class MakeBelieveDevice(Devices):
    """One device, its streams and its memory. ``refuses`` names what fails: ``lock``, ``queue``, ``arrive``."""

    def __init__(self, chance: random.Random, refuses: Iterable[str] = ()) -> None:
        self._chance = chance
        self.refuses = set(refuses)
        self.streams: list[LateStream] = []
        self.program = self.new_stream()
        """The current one."""
        self.copying = self.new_stream()
        self.locked: set[int] = set()
        """Addresses of the host that it may copy to."""
        self.faults: list[str] = []
        self._blocks: dict[int, _DeviceMemory] = {}
        self._free: list[_DeviceMemory] = []
        self._freed_later: list[tuple[_DeviceMemory, list[LateEvent]]] = []

    def new_stream(self) -> LateStream:
        self.streams.append(LateStream(self, self._chance.choice((0.01, 0.2, 1.0))))
        return self.streams[-1]

    def empty(self, num_elements: int, owner: LateStream | None = None) -> torch.Tensor:
        """A tensor of floats with anything in it, allocated on a stream, the current one unless another is named."""
        owner = owner or self.program
        self._take_back()
        for block in self._free:
            if block.owner is owner and block.raw.nbytes == 4 * num_elements:
                self._free.remove(block)
                break
        else:
            block = _DeviceMemory(owner, 4 * num_elements)
            self._blocks[block.raw.data_ptr()] = block
        return block.raw.view(torch.float32)

    def free(self, tensor: torch.Tensor) -> None:
        """Let go of the tensor: others may have its memory once the streams that it is kept for are through."""
        block = self._blocks[tensor.data_ptr()]
        ends = [stream.record_event() for stream in block.kept_for]
        block.kept_for = []
        self._freed_later.append((block, ends))

    def work(self, num_steps: int) -> bool:
        """Let time pass; whether there was so much to do."""
        for _ in range(num_steps):
            ready = [stream for stream in self.streams if stream.can_go_on()]
            if not ready:
                return False
            self._chance.choices(ready, [stream.haste for stream in ready])[0].go_on()
        return True

    def work_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if "arrive" in self.refuses:
                raise RuntimeError("make-believe error: the device is lost")
            if not self.work(1):
                raise AssertionError("streams wait for each other")

    # What `remesh.device.queued_copies` asks of devices.

    def device_of(self, tensor: torch.Tensor) -> Hashable | None:
        return "make-believe" if tensor.untyped_storage().data_ptr() in self._blocks else None

    def current_stream(self, device: Hashable) -> LateStream:
        return self.program

    def copying_stream(self, device: Hashable) -> LateStream:
        return self.copying

    def keep(self, tensor: torch.Tensor, stream: LateStream) -> None:
        self._blocks[tensor.untyped_storage().data_ptr()].kept_for.append(stream)

    def queue(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: LateStream) -> None:
        for number, (into, tensor) in enumerate(copies):
            if "queue" in self.refuses and number == len(copies) - 1:
                raise RuntimeError("make-believe error: out of memory of the device")
            self._queue_one(into, tensor, stream)

    def lock(self, raw: torch.Tensor) -> None:
        if "lock" in self.refuses:
            raise RuntimeError("make-believe error: out of memory of the host")
        self.locked.add(raw.data_ptr())

    def unlock(self, raw: torch.Tensor) -> None:
        self.locked.remove(raw.data_ptr())

    def _queue_one(self, into: torch.Tensor, tensor: torch.Tensor, stream: LateStream) -> None:
        page = into.untyped_storage().data_ptr()
        if page not in self.locked:
            self.faults.append("a copy was queued into pages that are not locked")

        def land() -> None:
            if page not in self.locked:
                self.faults.append("pages were unlocked while a copy was under way")
            into.copy_(tensor)

        stream.run(land)

    def _take_back(self) -> None:
        """Memory that nobody uses any more is free."""
        waiting = []
        for block, ends in self._freed_later:
            if all(end.is_reached for end in ends):
                self._free.append(block)
            else:
                waiting.append((block, ends))
        self._freed_later = waiting
