"""Order of threads and device streams that touch the same memory.

On a device a call returns when its work has been queued on the stream that is current in its thread. Each thread has a
current stream of its own, at first the default one, which waits for no stream that a program made.

- `CallersStreams`: a thread that works for a caller goes on with the caller's streams, so that its work is queued
  behind what the caller has queued; and in inference mode, if the caller is in it, whose tensors can be written nowhere
  else.
- `StreamOrder`: memory with one writer and many readers, each on the stream that is current in its thread. Work that
  was queued may still be under way when the host has gone on, so an event stands for the end of each use.
- `SideStream`: work beside the current stream, which waits for nothing but what it reads.
- `DeviceClock`: when work was done, which the host knows only if it waits.
- `run_apart`: a thread for work that may leave something with its thread.

Without a device there is nothing to wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from remesh.foundation.threads import make_thread


class CallersStreams:
    """What is current in the thread that makes this: its device, its streams, and whether it is in inference mode."""

    def __init__(self) -> None:
        self._is_inference = torch.is_inference_mode_enabled()
        self._device: int | None = None
        self._streams: list[Any] = []
        """One for each device."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._device = torch.cuda.current_device()
            self._streams = [torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Let these be current in this thread, too, as long as the context lasts."""
        with contextlib.ExitStack() as stack:
            if self._is_inference:
                stack.enter_context(torch.inference_mode())
            for stream in self._others():
                stack.enter_context(torch.cuda.stream(stream))
            if self._device is not None:
                stack.enter_context(torch.cuda.device(self._device))
            yield

    def _others(self) -> list[Any]:
        """Those that are not current here: to set a stream would make a context on its device."""
        return [stream for stream in self._streams if stream != torch.cuda.current_stream(stream.device)]


def run_apart(act: Callable[[], object]) -> None:
    """Do something in a thread of its own, and wait for it; raises what it raises.

    Whatever a library keeps by thread ends with it. The thread goes on with the caller's streams, and records no
    gradients.
    """
    streams = CallersStreams()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with streams.followed(), torch.no_grad():
                act()
        except BaseException as error:  # belongs to the caller
            raised.append(error)

    thread = make_thread("apart", work, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()


class StreamOrder:
    """The order on devices of the threads that write some memory and those that read it.

    On the host a lock keeps readers and writers apart; this is about work that is still queued. Not locked itself: to
    be called under that lock.
    """

    def __init__(
        self, devices: Collection[Any], current_stream: Callable[[Any], Any] = torch.cuda.current_stream
    ) -> None:
        self._devices = tuple(devices)
        self._current_stream = current_stream
        self._written: list[Any] = []
        """Events behind the last write, one for each device."""
        self._reads: dict[Any, Any] = {}
        """Stream to the event behind the last read on it. Those before the last write are in that one's events."""

    @classmethod
    def of(cls, tensors: Collection[torch.Tensor]) -> StreamOrder:
        """That of the memory of these tensors."""
        return cls({tensor.device for tensor in tensors if tensor.is_cuda})

    def begin_read(self) -> None:
        """What is queued from now on, on the current streams, reads what was written last."""
        for device in self._devices:
            for event in self._written:
                self._current_stream(device).wait_event(event)

    def end_read(self) -> None:
        """What is queued later may not read any more; what was queued before is still under way."""
        for device in self._devices:
            stream = self._current_stream(device)
            self._reads[stream] = stream.record_event()

    def begin_write(self) -> None:
        """What is queued from now on, on the current streams, overwrites what no reader needs any more."""
        for device in self._devices:
            for event in (*self._written, *self._reads.values()):
                self._current_stream(device).wait_event(event)

    def end_write(self) -> None:
        """All has been queued that is written, on the current streams."""
        self._written = [self._current_stream(device).record_event() for device in self._devices]
        self._reads.clear()


def wait_for_devices(devices: Collection[torch.device]) -> None:
    """Return when all is done that is queued on the current streams of these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _keep(tensor: torch.Tensor, stream: Any) -> None:
    """Keep the tensor's memory from being used again before all that the stream has been given is done."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


class SideStream:
    """Work of a device that goes on beside the current stream, in the order in which it is given.

    Memory that is allocated while it is at work belongs to it, and may be written at once: it never waits for what the
    current stream still has to do, but for what it is said to read.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Any = torch.cuda,
        keep: Callable[[torch.Tensor, Any], None] = _keep,
    ) -> None:
        self._device = device
        self._streams = streams
        self._keep = keep
        self._side = streams.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def at_work(self, reads: Collection[torch.Tensor] = ()) -> Iterator[None]:
        """Let what is queued in the context go here, behind what the current stream has queued of what it ``reads``."""
        if self._side is None:
            yield
            return
        if reads:
            self._side.wait_event(self._streams.current_stream(self._device).record_event())
            for tensor in reads:
                self._keep(tensor, self._side)
        with self._streams.stream(self._side):
            yield

    def mark(self) -> Any:
        """The place behind all that was given so far; None without a device."""
        return None if self._side is None else self._side.record_event()

    def wait(self, mark: Any, reads: Collection[torch.Tensor] = ()) -> None:
        """Let what is queued later on the current stream come behind such a place; it ``reads`` what was made here."""
        if self._side is None:
            return
        current = self._streams.current_stream(self._device)
        current.wait_event(mark)
        for tensor in reads:
            self._keep(tensor, current)


class DeviceClock:
    """When the work of a device is done, in seconds since this was made; on the CPU, when the host comes by."""

    def __init__(self, device: torch.device, streams: Any = torch.cuda) -> None:
        self._device = device
        self._streams = streams
        self._begun = self.mark()

    def mark(self) -> Any:
        """The place behind all that is queued now on the current stream."""
        if self._device.type != "cuda":
            return time.monotonic()
        event = self._streams.Event(enable_timing=True)
        event.record(self._streams.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """When the device came to a place, which it is waited for."""
        if self._device.type != "cuda":
            return float(mark - self._begun)
        mark.synchronize()
        return float(self._begun.elapsed_time(mark)) / 1e3
