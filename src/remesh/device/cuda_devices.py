"""CUDA devices for `queued_copies`: one stream for copies on each, and page-locked host memory.

Memory is locked where it lies, and not taken from torch's allocator of locked memory: copies lie in files in memory,
which other processes can map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch

from remesh.device.queued_copies import QueuedCopy

_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable"""


class CudaDevices:
    """All devices of this process. It touches none before a tensor of one comes."""

    def device_of(self, tensor: torch.Tensor) -> Hashable | None:
        return tensor.device if tensor.is_cuda else None

    def current_stream(self, device: Any) -> Any:
        return torch.cuda.current_stream(device)

    def copying_stream(self, device: Any) -> Any:
        return _copying_stream(device)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def queue(self, copies: Sequence[QueuedCopy], stream: Any) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            for into, tensor in copies:
                # On the device: of a queued copy torch would conjugate or negate what is on the host before it arrives.
                into.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)

    def lock(self, raw: torch.Tensor) -> None:
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _check(driver.cudaHostRegister(raw.data_ptr(), raw.nbytes, _FOR_ALL_DEVICES))

    def unlock(self, raw: torch.Tensor) -> None:
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _check(driver.cudaHostUnregister(raw.data_ptr()))


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


CUDA = CudaDevices()
