"""Threads and streams of a device keep the order of the host, on a device that is made believe."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import remesh
from remesh.checkpoint.formats import fetch
from remesh.device.streams import CallersStreams, StreamOrder, run_apart
from tests.fake_gpu import LateStream, MakeBelieveDevice

DEVICE = SimpleNamespace(type="cuda", index=0)
NUM_ELEMENTS = 8


class ReadersAndWriters:
    """Two buffers, written in turns and read by several streams, as a refit does; ``left_out`` names what is not
    called of the order."""

    def __init__(self, seed: int, left_out: str = "") -> None:
        self.chance = random.Random(seed)
        self.device = MakeBelieveDevice(self.chance)
        self.streams = [self.device.new_stream() for _ in range(4)]
        self.buffers = [torch.zeros(NUM_ELEMENTS) for _ in range(2)]
        self.orders = [StreamOrder([DEVICE], self.device.current_stream) for _ in self.buffers]
        if left_out:
            for order in self.orders:
                setattr(order, left_out, lambda: None)
        self.version = 0
        self.torn: list[tuple[int, list[float]]] = []

    def run(self) -> bool:
        """Whether every reader saw the version that it was shown, and nothing of another."""
        self.write()
        for _ in range(40):
            self.chance.choice((self.write, self.read, self.read, self.read))()
            self.device.work(self.chance.choice((0, 0, 1, 10)))
        self.device.work(10_000)
        return not self.torn

    def on_some_stream(self) -> LateStream:
        self.device.program = self.chance.choice(self.streams)
        return self.device.program

    def write(self) -> None:
        back, version = (self.version + 1) % 2, self.version + 1
        stream, order = self.on_some_stream(), self.orders[back]
        order.begin_write()
        for at in range(NUM_ELEMENTS):
            stream.run(partial(self.buffers[back].__setitem__, at, version))
        order.end_write()
        self.version = version

    def read(self) -> None:
        front, version = self.version % 2, self.version
        stream, order = self.on_some_stream(), self.orders[front]
        order.begin_read()
        for at in range(NUM_ELEMENTS):
            stream.run(partial(self.look, front, at, version))
        order.end_read()

    def look(self, front: int, at: int, version: int) -> None:
        if self.buffers[front][at] != version:
            self.torn.append((version, self.buffers[front].tolist()))


def test_readers_see_whole_versions_on_whatever_streams() -> None:
    assert [seed for seed in range(100) if not ReadersAndWriters(seed).run()] == []


@pytest.mark.parametrize("left_out", ["begin_read", "end_read", "begin_write", "end_write"])
def test_no_part_of_the_order_can_be_left_out(left_out: str) -> None:
    assert not all(ReadersAndWriters(seed, left_out).run() for seed in range(100))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.cuda with two devices, whose current streams are known by name, thread by thread.

    ``was_set`` has those that were made current anywhere.
    """
    here, was_set = threading.local(), set[str]()

    def set_stream(stream: Any) -> None:
        was_set.add(f"{stream.name} {stream.device}")
        setattr(here, f"stream{stream.device}", stream)

    cuda = SimpleNamespace(
        default_stream=lambda device: SimpleNamespace(name="default", device=device),
        current_stream=lambda device: getattr(here, f"stream{device}", None) or cuda.default_stream(device),
        set_stream=set_stream,
        current_device=lambda: getattr(here, "device", 0),
        set_device=lambda number: setattr(here, "device", number),
    )

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        before = cuda.current_stream(one.device)
        cuda.set_stream(one)
        yield
        cuda.set_stream(before)

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        before = cuda.current_device()
        cuda.set_device(number)
        yield
        cuda.set_device(before)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, one in {**vars(cuda), "stream": stream, "device": device}.items():
        monkeypatch.setattr(torch.cuda, name, one)
    cuda.was_set = was_set
    return cuda


def use_a_side_stream(cuda: Any) -> None:
    """Device 1, and on it a stream that the program made."""
    cuda.set_device(1)
    cuda.set_stream(SimpleNamespace(name="side", device=1))


def current(cuda: Any) -> tuple[int, str, str]:
    return cuda.current_device(), cuda.current_stream(0).name, cuda.current_stream(1).name


def test_a_thread_follows_the_streams_of_its_caller_and_sets_no_default_one(streams: Any) -> None:
    use_a_side_stream(streams)
    callers, seen = CallersStreams(), []

    def work() -> None:
        with callers.followed():
            seen.append(current(streams))
        seen.append(current(streams))

    streams.was_set.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(1, "default", "side"), (0, "default", "default")]
    assert "default 0" not in streams.was_set, "that would make a context on a device that nobody uses"


def test_a_thread_with_a_stream_of_its_own_follows_a_caller_on_the_default_one(streams: Any) -> None:
    """As who asks for the result of a refit that another thread has started."""
    callers, seen = CallersStreams(), []

    def work() -> None:
        use_a_side_stream(streams)
        with callers.followed():
            seen.append(current(streams))
        seen.append(current(streams))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, "default", "default"), (1, "default", "side")]


def test_what_runs_apart_follows_its_caller_and_leaves_nothing_with_its_thread(streams: Any) -> None:
    use_a_side_stream(streams)
    kept, seen = threading.local(), []

    def act() -> None:
        kept.mine = True
        seen.append((current(streams), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    run_apart(act)
    with torch.inference_mode():
        run_apart(act)
    assert seen == [((1, "default", "side"), is_inference, False) for is_inference in (False, True)]
    assert not hasattr(kept, "mine")
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 // 0)


def test_what_inference_mode_has_made_is_filled_in_it_by_a_thread() -> None:
    with torch.inference_mode():
        give, take = {"w": torch.arange(8.0)}, {"w": torch.zeros(8)}
        remesh.reshard_async(give, take).result()
        assert torch.equal(take["w"], give["w"])
        refit = remesh.Refit({"w": torch.zeros(8)})
        refit.push(give, 1)
        with refit.read() as weights:
            seen = weights.tensors["w"]
            assert isinstance(seen, torch.Tensor) and torch.equal(seen, give["w"])


def test_threads_that_read_a_checkpoint_follow_the_caller(
    streams: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remesh.save({"w": torch.arange(1 << 18, dtype=torch.float64)}, tmp_path / "c")
    use_a_side_stream(streams)
    real, seen = fetch._ChunkFill._spread, set()

    def spread(self: Any, *args: Any) -> None:
        seen.add((threading.current_thread() is threading.main_thread(), current(streams)))
        real(self, *args)

    monkeypatch.setattr(fetch._ChunkFill, "_spread", spread)
    remesh.load({"w": torch.zeros(1 << 18)}, tmp_path / "c")  # a cast: as with a device, not read straight into it
    assert seen == {(False, (1, "default", "side"))}
