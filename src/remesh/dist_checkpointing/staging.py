"""Where do the copies of a background save lie? In buffers that are used again.

Memory that a process touches for the first time costs several times as much as copying into it. So a buffer that has
been written to disk is kept for the next save. At most one idle buffer is kept; buffers in use belong to their save
and are forgotten with it if it never comes to be written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of some tensors, on the CPU."""

    tensors: list[torch.Tensor]
    """Row-major, in order; they share the memory of the buffer."""
    buffer: torch.Tensor


class Staging:
    """Makes copies of tensors, and takes back their memory. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: torch.Tensor | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> Copies:
        """Copies that nobody else changes."""
        starts, num_bytes = [], 0
        for tensor in tensors:
            starts.append(num_bytes)
            size = tensor.numel() * tensor.element_size()
            num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer = self._take(num_bytes)
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            raw = buffer[start : start + tensor.numel() * tensor.element_size()]
            copies.append(raw.view(tensor.dtype).view(tensor.shape).copy_(tensor))
        return Copies(copies, buffer)

    def give_back(self, copies: Copies) -> None:
        """Let the memory be used again; the copies are lost."""
        with self._lock:
            if self._idle is None or self._idle.numel() < copies.buffer.numel():
                self._idle = copies.buffer

    def release(self) -> None:
        """Free the idle buffer."""
        with self._lock:
            self._idle = None

    def _take(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and num_bytes <= idle.numel() <= 2 * num_bytes:
            return idle
        return torch.empty(num_bytes, dtype=torch.uint8)
