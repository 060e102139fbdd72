"""Work beside the current stream of a device is in order with what it reads and with who reads it, and nothing else."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remesh.device.streams import DeviceClock, SideStream
from tests.fake_gpu import LateStream, MakeBelieveDevice

DEVICE = SimpleNamespace(type="cuda")
NUM_ELEMENTS = 8


class Streams:
    """What a side stream asks of torch, for a device that is made believe."""

    def __init__(self, device: MakeBelieveDevice) -> None:
        self._device = device

    def Stream(self, device: Any) -> LateStream:
        return self._device.new_stream()

    def current_stream(self, device: Any) -> LateStream:
        return self._device.program

    @contextlib.contextmanager
    def stream(self, side: LateStream) -> Iterator[None]:
        before, self._device.program = self._device.program, side
        yield
        self._device.program = before


class Stage:
    """Computes values that leave by a side stream, and with values that came by it, in any order; ``left_out`` names a
    wait that is not made."""

    def __init__(self, seed: int, left_out: str = "") -> None:
        self.chance = random.Random(seed)
        self.device = MakeBelieveDevice(self.chance)
        keep = (lambda tensor, stream: None) if left_out == "keep" else self.device.keep
        self.side = SideStream(DEVICE, Streams(self.device), keep)  # type: ignore[arg-type]
        self.left_out = left_out
        self.coming: list[tuple[Any, torch.Tensor, float]] = []
        self.wrong = 0
        self.last = 0.0

    def run(self) -> bool:
        """Whether everything that left, and everything that was computed with, had its own values."""
        for _ in range(60):
            self.chance.choice((self.give, self.bring, self.use))()
            self.device.work(self.chance.choice((0, 0, 1, 10)))
        self.device.work(10_000)
        return not self.wrong

    def next_value(self) -> float:
        self.last += 1.0
        return self.last

    def look(self, tensor: torch.Tensor, value: float) -> None:
        self.wrong += not tensor.eq(value).all()

    def give(self) -> None:
        value, tensor = self.next_value(), self.device.empty(NUM_ELEMENTS)
        self.device.program.run(partial(tensor.fill_, value))
        with self.side.at_work([] if self.left_out == "reads" else [tensor]):
            self.device.program.run(partial(self.look, tensor, value))
        self.device.free(tensor)

    def bring(self) -> None:
        value = self.next_value()
        with self.side.at_work():
            tensor = self.device.empty(NUM_ELEMENTS)
            self.device.program.run(partial(tensor.fill_, value))
        self.coming.append((self.side.mark(), tensor, value))

    def use(self) -> None:
        if self.coming:
            mark, tensor, value = self.coming.pop(self.chance.randrange(len(self.coming)))
            if self.left_out != "wait":
                self.side.wait(mark, [tensor])
            self.device.program.run(partial(self.look, tensor, value))
            self.device.free(tensor)


def test_what_leaves_and_what_comes_has_its_values_under_any_order_of_streams() -> None:
    assert [seed for seed in range(100) if not Stage(seed).run()] == []


@pytest.mark.parametrize("left_out", ["reads", "wait", "keep"])
def test_no_wait_of_a_side_stream_can_be_left_out(left_out: str) -> None:
    assert not all(Stage(seed, left_out).run() for seed in range(100))


def test_what_comes_waits_for_nothing_that_is_computed() -> None:
    device = MakeBelieveDevice(random.Random(1))
    side = SideStream(DEVICE, Streams(device))  # type: ignore[arg-type]
    device.program.haste = 1e-9
    done: list[str] = []
    device.program.run(lambda: done.append("computed"))
    with side.at_work():
        device.program.run(lambda: done.append("came"))
    device.work(10)
    assert done == ["came", "computed"]


def test_without_a_device_there_is_nothing_to_wait_for() -> None:
    side = SideStream(torch.device("cpu"))
    with side.at_work([torch.zeros(1)]):
        pass
    side.wait(side.mark(), [torch.zeros(1)])


class LateClock:
    """A device that comes to a place when it is waited for; each takes it two more milliseconds."""

    def __init__(self) -> None:
        self.reached_ms = 0.0

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_ms=None)

        def synchronize() -> None:
            self.reached_ms += 2.0
            event.at_ms = self.reached_ms

        event.record = lambda stream: None
        event.synchronize = synchronize
        event.elapsed_time = lambda other: other.at_ms - (event.at_ms or 0.0)
        return event

    def current_stream(self, device: Any) -> object:
        return object()


def test_a_clock_tells_when_the_device_came_and_not_when_the_host_went_on() -> None:
    clock = DeviceClock(DEVICE, LateClock())  # type: ignore[arg-type]
    marks = [clock.mark(), clock.mark()]
    assert [clock.seconds(mark) for mark in marks] == [0.002, 0.004]
