"""Programs at random for a make-believe device: what a save copies must be what was queued before it.

The oracle knows the order in which a program queues its work, and nothing of how a save copies.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

from remesh.checkpoint.background.staging import Copies, StagingBuffers
from tests.fake_gpu import LateStream, MakeBelieveDevice

_NUM_ELEMENTS = 16


class DeviceProgram:
    """A program that computes on two streams, saves whenever it likes, and lets others write what it saved."""

    def __init__(self, seed: int, **dropped: Any) -> None:
        self.chance = random.Random(seed)
        self.device = MakeBelieveDevice(self.chance)
        self.side = self.device.new_stream()
        self.staging = StagingBuffers(devices=Without(self.device, **dropped))  # type: ignore[arg-type]
        self.tensors: list[tuple[torch.Tensor, LateStream]] = []
        self.values: list[float] = []
        """What each tensor has once all is done that is queued."""
        self.saves: list[tuple[Copies, list[float]]] = []
        self.torn = 0
        self._last_value = 0.0

    def run(self, num_acts: int = 60) -> bool:
        """Whether every save had the values of its moment, and the device was treated well."""
        acts = [
            self.make,
            self.make,
            self.change,
            self.change,
            self.drop,
            self.save,
            self.save,
            self.write,
            self.forget,
        ]
        for _ in range(num_acts):
            self.chance.choice(acts)()
            self.device.work(self.chance.choice((0, 0, 1, 10)))
        while self.saves:
            self.write()
        self.device.work(10_000)
        return not self.torn and not self.device.faults

    def make(self) -> None:
        owner = self.chance.choice((self.device.program, self.side))
        tensor = self.device.empty(_NUM_ELEMENTS, owner)
        self.tensors.append((tensor, owner))
        self.values.append(self._fill(tensor, owner))
        self._follow(self.device.program, owner)

    def change(self) -> None:
        """In place; on the side stream behind what is queued on the current one, as a program has to."""
        if not self.tensors:
            return
        at = self.chance.randrange(len(self.tensors))
        tensor, owner = self.tensors[at]
        self._follow(owner, self.device.program)
        self.values[at] = self._fill(tensor, owner)
        self._follow(self.device.program, owner)

    def drop(self) -> None:
        """Tensors are used on the stream that they were allocated on only, so far as the program knows."""
        if self.tensors:
            at = self.chance.randrange(len(self.tensors))
            self.device.free(self.tensors.pop(at)[0])
            self.values.pop(at)

    def save(self) -> None:
        """Of what is on the device and on the host, in any order."""
        chosen = [(one[0], value) for one, value in zip(self.tensors, self.values, strict=True) if self._likes(0.7)]
        self._last_value += 1.0
        chosen += [(torch.full((_NUM_ELEMENTS,), self._last_value), self._last_value) for _ in range(2)]
        self.chance.shuffle(chosen)
        self.saves.append((self.staging.copy([tensor for tensor, _ in chosen]), [value for _, value in chosen]))

    def write(self) -> None:
        if self.saves:
            copies, values = self.saves.pop(self.chance.randrange(len(self.saves)))
            there = copies.wait().tensors
            self.device.work(self.chance.choice((0, 20)))
            self.torn += sum(not one.eq(value).all() for one, value in zip(there, values, strict=True))
            self.staging.give_back(copies)

    def forget(self) -> None:
        """Give up a save that nobody waits for."""
        if self.saves:
            copies, _ = self.saves.pop(self.chance.randrange(len(self.saves)))
            if self._likes(0.5):
                self.staging.give_back(copies)

    def _likes(self, likelihood: float) -> bool:
        return self.chance.random() < likelihood

    def _fill(self, tensor: torch.Tensor, stream: LateStream) -> float:
        self._last_value += 1.0
        value = self._last_value
        stream.run(partial(tensor.fill_, value))
        return value

    def _follow(self, later: LateStream, earlier: LateStream) -> None:
        if later is not earlier:
            later.wait_event(earlier.record_event())


class Without:
    """A device of which one wait is left out: of a stream (``current``, ``copying``), the ``host``, the allocator."""

    def __init__(self, device: MakeBelieveDevice, left_out: str = "") -> None:
        self._device = device
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        if self._left_out != "keep":
            self._device.keep(tensor, stream._stream)

    def queue(self, copies: Any, stream: Any) -> None:
        self._device.queue(copies, stream._stream)

    def current_stream(self, device: Any) -> Any:
        return _StreamWithout(self._device.program, self._left_out == "current", False)

    def copying_stream(self, device: Any) -> Any:
        return _StreamWithout(self._device.copying, self._left_out == "copying", self._left_out == "host")


class _StreamWithout:
    def __init__(self, stream: LateStream, waits_not: bool, is_reached: bool) -> None:
        self._stream, self._waits_not, self._is_reached = stream, waits_not, is_reached

    def wait_event(self, event: Any) -> None:
        if not self._waits_not:
            self._stream.wait_event(event._event if isinstance(event, _NeverWaitedFor) else event)

    def record_event(self) -> Any:
        event = self._stream.record_event()
        return _NeverWaitedFor(event) if self._is_reached else event


class _NeverWaitedFor:
    """An event for which streams wait, and the host does not."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def synchronize(self) -> None:
        pass
