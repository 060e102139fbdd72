"""Messages to a worker process: a pickled call, whose tensors travel as descriptors of shared memory.

A message is a number of descriptors, these, and a pickle that refers to the buffers behind them. A tensor in a staging
buffer is pickled as its place there, so both processes see the same memory. Other tensors are pickled as
their bytes, not as torch does it: libraries replace what torch unpickles with, and a worker would import them for it.
The rest is pickled by value, functions by name: those of the main script cannot be found in another process, and are
refused.

Both ends are this package's own, on a socket that no other process has.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch

from remesh.checkpoint.background.staging import Copies
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.formats.blob_frame import memory_of


class WorkerError(CheckpointingException):
    """A worker process is gone."""


class Channel:
    """One end of a connection. Sends and receives whole messages."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; `CheckpointingException` for one that cannot be pickled."""
        file = io.BytesIO()
        pickler = _CopiesPickler(file)
        try:
            pickler.dump(message)
        except (pickle.PicklingError, TypeError, AttributeError) as raised:
            raise CheckpointingException(
                f"writing in another process: expected a function of an importable module and values that can be "
                f"pickled, found: {raised}; define the function in a module, or write in a thread"
            ) from raised
        with self._sending:
            self._end.send_bytes(bytes([len(pickler.descriptors)]))
            for descriptor in pickler.descriptors:
                send_handle(self._end, descriptor, None)
            self._end.send_bytes(file.getbuffer())

    def receive(self) -> Any:
        """The next message; EOFError when the other end is closed."""
        (count,) = self._end.recv_bytes()
        descriptors = [recv_handle(self._end) for _ in range(count)]
        try:
            return _CopiesUnpickler(io.BytesIO(self._end.recv_bytes()), descriptors).load()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)  # what is mapped stays mapped

    def close(self) -> None:
        """Let the other end see the end of the connection."""
        self._end.close()


class _CopiesPickler(pickle.Pickler):
    """Pickles `Copies` as the places of their tensors in a buffer whose descriptor is sent along."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.descriptors: list[int] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Copies) or obj.buffer is None:
            return None
        self.descriptors.append(obj.buffer.descriptor)
        first = obj.buffer.raw.data_ptr()
        places = [(one.data_ptr() - first if one.numel() else 0, one.dtype, tuple(one.shape)) for one in obj.tensors]
        return len(self.descriptors) - 1, obj.buffer.num_bytes, places

    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        if not is_plain or obj.requires_grad:
            return NotImplemented
        content = obj.resolve_conj().resolve_neg().contiguous()
        return _tensor_of, (pickle.PickleBuffer(memory_of(content)), obj.dtype, tuple(obj.shape))


def _tensor_of(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these bytes, which it keeps."""
    return (
        torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype, device="cpu")
    )


class _CopiesUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, descriptors: list[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors

    def persistent_load(self, pid: Any) -> Any:
        at, num_bytes, places = pid
        memory = mmap.mmap(self._descriptors[at], max(1, num_bytes))
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        tensors = []
        for start, dtype, shape in places:
            num_of_tensor = math.prod(shape) * dtype.itemsize
            tensors.append(raw[start : start + num_of_tensor].view(dtype).view(shape))
        return Copies(tensors, None)
