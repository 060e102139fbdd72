"""Communicators on a device that nobody has: severing never waits for their abort, shedding does, and not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from remesh.foundation import torch_private
from remesh.foundation.errors import ConfigError, PeerError
from remesh.groups import lower
from remesh.groups.lower import LowerHalf

LONG_S = 30.0


class Communicator:
    """What a group has on a device: an abort by itself waits for what all others have running there, as NCCL's does."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.error = "SUCCESS"
        self.is_aborted = False

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        self.device.told.append(f"abort on {threading.current_thread().name}")
        self.device.end(self)


class Device:
    """Its communicators; a hanging collective spins in each until it is aborted."""

    def __init__(self) -> None:
        self.communicators = [Communicator(self) for _ in range(3)]
        self.told: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        """Cleared for an abort that never ends by itself."""
        self._changed = threading.Condition()

    def end(self, aborted: Communicator) -> None:
        """Return when nothing spins on the device any more."""
        self.goes_on.wait(LONG_S)
        with self._changed:
            aborted.is_aborted = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: all(each.is_aborted for each in self.communicators), LONG_S):
                raise RuntimeError("ProcessGroup abort timed out")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    believed = {object(): each for each in device.communicators}
    with monkeypatch.context() as patch:
        patch.setattr(lower, "all_groups", lambda: [object(), *believed])
        patch.setattr(torch_private, "nccl_of", believed.get)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        patch.setattr(lower, "cut_connections", lambda sockets: device.told.append("connections are cut"))
        yield device
    device.goes_on.set()


def test_all_communicators_are_aborted_at_once_each_in_a_thread_of_its_own(device: Device) -> None:
    half = LowerHalf("nccl", "cuda", LONG_S)
    half.sever()
    half.shed()
    assert all(each.is_aborted for each in device.communicators)
    assert device.told == ["connections are cut", *["abort on remesh-abort"] * 3], "no vote goes out after an abort"


def test_severing_returns_while_an_abort_hangs_and_shedding_says_that_the_process_is_of_no_use(device: Device) -> None:
    device.goes_on.clear()
    half = LowerHalf("nccl", "cuda", 0.05)
    half.sever()
    half.sever()
    assert len(device.told) < 6, "an abort that is under way is not begun again"
    with pytest.raises(PeerError, match=r"still under way after 0\.05 s; the device is of no use"):
        half.shed()


def test_an_abort_that_fails_is_told_by_who_sheds(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(device.communicators[1], "abort", fail)
        device.communicators[1].is_aborted = device.communicators[2].is_aborted = True
        half = LowerHalf("nccl", "cuda", LONG_S)
        half.sever()
        with pytest.raises(PeerError, match="found: CUDA error: the device is lost"):
            half.shed()


@pytest.mark.parametrize("error", ["TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"])
def test_whoever_asks_hears_of_what_torch_gave_up(device: Device, error: str) -> None:
    half = LowerHalf("nccl", "cuda", LONG_S)
    half.check_end()
    device.communicators[2].error = error
    with pytest.raises(PeerError, match=f"found {error}: one was given up"):
        half.check_end()


def test_whoever_asks_hears_that_another_thread_has_severed(device: Device) -> None:
    half = LowerHalf("nccl", "cuda", LONG_S)
    half.sever()
    with pytest.raises(PeerError, match="the groups were severed"):
        half.check_end()
    half.shed()
    half.check_end()


def test_without_a_device_nobody_asks(device: Device) -> None:
    device.communicators[0].error = "TIMEOUT"
    LowerHalf("gloo", "cpu", LONG_S).check_end()


def test_ranks_with_and_without_a_device_do_not_wait_for_each_other() -> None:
    store = dist.HashStore()
    store.compare_set("remesh-backend", "", "nccl")
    half = LowerHalf("gloo", "cpu", LONG_S)
    with pytest.raises(ConfigError, match=r"rank 1 is to talk over gloo, others over nccl.*CUDA_VISIBLE_DEVICES"):
        half.grow(store, 1, {"dp": 2})
    assert not dist.is_initialized()
