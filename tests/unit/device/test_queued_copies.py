"""Copies of device memory behind a program: true under any order that streams allow, and no wait can be left out."""

from __future__ import annotations

import gc
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import remesh
from remesh.checkpoint.background import saving_thread, staging
from remesh.checkpoint.background.staging import StagingBuffers
from remesh.device import queued_copies
from remesh.device.queued_copies import CUDA
from remesh.foundation.errors import DeviceError
from tests.fake_gpu import MakeBelieveDevice
from tests.unit.checkpoint.device_programs import DeviceProgram


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_a_save_has_what_was_queued_before_it_and_nothing_else(first_seed: int) -> None:
    failed = [seed for seed in range(first_seed, first_seed + 100) if not DeviceProgram(seed).run()]
    assert not failed, f"seeds {failed}"


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param("copying", id="the copying stream does not wait for the program's"),
        pytest.param("current", id="the program's stream does not wait for the copies"),
        pytest.param("keep", id="the allocator hands memory on before it is copied"),
        pytest.param("host", id="the writer does not wait for the copies"),
    ],
)
def test_no_wait_can_be_left_out(left_out: str) -> None:
    assert not all(DeviceProgram(seed, left_out=left_out).run() for seed in range(100))


def test_memory_is_neither_unlocked_nor_used_again_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(queued_copies.LockedMemory, "is_free", lambda self: True)
        assert not all(DeviceProgram(seed).run() for seed in range(100)), "used again"
    with monkeypatch.context() as patch:
        patch.setattr(queued_copies, "_unlock", lambda devices, raw, ends: devices.unlock(raw))
        assert not all(DeviceProgram(seed).run() for seed in range(100)), "unlocked"


def device_with(num_tensors: int, *refuses: str) -> tuple[MakeBelieveDevice, list[torch.Tensor]]:
    device = MakeBelieveDevice(random.Random(1), refuses)
    tensors = [device.empty(100) for _ in range(num_tensors)]
    for number, tensor in enumerate(tensors):
        device.program.run(partial(tensor.fill_, float(number)))
    return device, tensors


def test_the_host_waits_for_nothing_and_mixes_what_it_copies_itself() -> None:
    device, tensors = device_with(3)
    on_host = [torch.full((5,), 7.0), torch.zeros(0)]
    copies = StagingBuffers(devices=device).copy([tensors[0], *on_host, *tensors[1:]])
    assert copies.tensors[1].eq(7).all()
    assert device.copying.work, "nothing has happened on the device"
    found = copies.wait().tensors
    assert [one[0].item() for one in (found[0], *found[3:])] == [0, 1, 2]


def test_locked_memory_is_used_again_and_unlocked_at_the_end() -> None:
    device, tensors = device_with(2)
    buffers = StagingBuffers(devices=device)
    first = buffers.copy(tensors)
    locked = set(device.locked)
    assert len(locked) == 1
    buffers.give_back(first)
    second = buffers.copy(tensors)
    assert device.locked == locked
    del first, second
    buffers.release()
    gc.collect()
    assert not device.locked
    assert not device.faults


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("lock", "expected to lock 896 bytes of the host into memory, found make-believe error: out of memory of"),
        ("queue", "expected 896 bytes of them on the host, found: make-believe error: out of memory of the device"),
        ("arrive", "found: make-believe error: the device is lost; the save does not exist"),
    ],
)
def test_what_a_device_refuses_is_told_and_its_memory_given_back(refused: str, words: str) -> None:
    device, tensors = device_with(2, refused)
    buffers = StagingBuffers(max_bytes=1000, devices=device)
    with pytest.raises(DeviceError, match=words):
        copies = buffers.copy(tensors)
        try:
            copies.wait()
        finally:
            buffers.give_back(copies)
    assert buffers.used_bytes == 0
    device.refuses.clear()
    copies = buffers.copy(tensors)
    assert [one[0].item() for one in copies.wait().tensors] == [0, 1]
    assert not device.faults


def test_a_background_save_writes_what_the_device_had_when_it_was_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, tensors = device_with(2)
    with monkeypatch.context() as patch:
        patch.setattr(saving_thread, "_alone", [])
        patch.setattr(saving_thread, "StagingBuffers", partial(StagingBuffers, devices=device))
        saved = remesh.save({"a": tensors[0], "b": tensors[1]}, tmp_path / "s", background=True)
        for tensor in tensors:
            device.program.run(partial(tensor.fill_, -1.0))
        saved.result()
    found = {"a": torch.zeros(100), "b": torch.zeros(100)}
    remesh.load(found, tmp_path / "s")
    assert found["a"].eq(0).all() and found["b"].eq(1).all()
    assert staging.CUDA.device_of(tensors[0]) is None


def test_a_refused_lock_is_told_once_and_not_again_by_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does: the error of a call stays for whoever asks next, as torch does behind every kernel."""
    out_of_memory, left = 2, [0]

    def register(*_: int) -> int:
        left[0] = out_of_memory
        return out_of_memory

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"make-believe error {code}")

    def launch(*_: object, **__: object) -> None:
        found, left[0] = left[0], 0
        check(found)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "check_error", check)
    raw = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(fill_=launch))
    with pytest.raises(RuntimeError, match="make-believe error 2"):
        CUDA.lock(raw)
    launch()
