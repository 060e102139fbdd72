"""Reads of stored chunks into tensors, of no more bytes than they need.

For each chunk:

1. If its blob begins with the very bytes that `blob_frame` expects for the dtype and shape, the elements begin behind
   them, row-major. Ranges of them are read on their own: straight into the tensor that wants them, where dtype and
   memory allow, else through a window and a cast.
2. Bare elements, of formats that keep no blobs, are read in the same way.
3. Any other blob (older writers, tensors saved with strides of their own) is read whole and parsed by torch.

Chunks that lie close together in a file and are small are fetched with one read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.formats.blob_frame import Frame, frame_of, memory_of, words_of
from remesh.checkpoint.formats.data_file import load_object, read_tensor
from remesh.checkpoint.formats.small_blobs import Small, read_small
from remesh.checkpoint.formats.torch_format import path_inside
from remesh.checkpoint.plan.manifest import Extent
from remesh.checkpoint.plan.slabs import Slab, find_runs, plan_slabs
from remesh.checkpoint.storage.checked_file import WINDOW_BYTES, CheckedFile
from remesh.checkpoint.storage.integrity import Checksums
from remesh.device.streams import CallersStreams
from remesh.foundation.checksums import crc32
from remesh.layout import Box, row_major_strides
from remesh.layout.from_torch import torch_dtype

_SMALL_BLOB_BYTES = 1 << 20
_WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Destination:
    """The tensor, and the place in it, that a box of a chunk is copied to."""

    box: Box
    """In indices of the chunk."""
    place: torch.Tensor
    """Of the shape of the box; any device, dtype and strides."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk and all that is wanted of it."""

    extent: Extent
    dtype: str
    shape: tuple[int, ...]
    """Of the stored elements."""
    destinations: tuple[Destination, ...]
    what: str
    """For messages."""
    is_bare: bool = False
    """Whether the extent holds nothing but the elements."""


def fetch(
    checksums: Checksums, reads: Sequence[ChunkRead], small: Mapping[str, Sequence[Small]] = MappingProxyType({})
) -> int:
    """Fill every destination; returns the number of bytes read. Reads in order of files and places read fastest.

    ``small`` are small tensors by the file that they lie in, which are read many at once. Files lie where their
    checksums do. Raises `CheckpointFormatError` for damaged files; destinations then hold anything.
    """
    num_bytes = 0
    # Readers copy to devices: where a device is in use, in the order of what the caller has queued there.
    follow = CallersStreams().followed if torch.cuda.is_initialized() else nullcontext  # type: ignore[no-untyped-call]
    for name, wanted in small.items():
        with open_data(checksums, name, follow) as file:
            read_small(file, wanted, partial(_read_alone, file, name))
        num_bytes += file.num_bytes_read
    for name, of_file in groupby(reads, key=lambda read: read.extent.file):
        with open_data(checksums, name, follow) as file:
            chosen = list(of_file)
            aheads = _aheads([read.extent for read in chosen], file.worthwhile_gap_bytes)
            for read, ahead in zip(chosen, aheads, strict=True):
                _ChunkFill(file, read, ahead).fill()
        num_bytes += file.num_bytes_read
    return num_bytes


def _read_alone(file: CheckedFile, name: str, small: Small) -> None:
    frame, extent = small.frame, Extent(name, small.file_start, small.frame.blob_bytes)
    destination = Destination(Box.of_shape(frame.shape), small.place.detach())
    what = f"tensor {small.key!r} in {file.path.parent}"
    _ChunkFill(file, ChunkRead(extent, frame.dtype, frame.shape, (destination,), what), extent.file_stop).fill()
    file.wait()


def read_objects(checksums: Checksums, extents: Sequence[Extent], *, with_stand_ins: bool = False) -> list[Any]:
    """The object in each extent, as `load_object` gives it."""
    return [
        load_object(blob, f"{checksums.directory}/{extent}", with_stand_ins=with_stand_ins)
        for blob, extent in zip(read_blobs(checksums, extents), extents, strict=True)
    ]


def read_blobs(checksums: Checksums, extents: Sequence[Extent]) -> list[bytes]:
    """The bytes in each extent, compared with their checksums."""
    blobs: list[bytes] = []
    for name, of_file in groupby(extents, key=lambda extent: extent.file):
        with open_data(checksums, name) as file:
            chosen = list(of_file)
            for extent, ahead in zip(chosen, _aheads(chosen, file.worthwhile_gap_bytes), strict=True):
                what = f"{checksums.directory}/{extent}"
                blobs.append(bytes(file.view(extent.file_start, extent.file_stop, what, ahead=ahead)))
    return blobs


def open_data(
    checksums: Checksums, name: str, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> CheckedFile:
    """A data file of a checkpoint, to be used as a context manager."""
    path = path_inside(checksums.directory, name)
    trailer = checksums.trailer_of(name)
    try:
        return CheckedFile(path, trailer, around)
    except (FileNotFoundError, IsADirectoryError) as raised:
        raise CheckpointFormatError(
            "missing-file",
            f"opening data file {path}: {raised.strerror}; the checkpoint is incomplete, use another one",
        ) from raised


def _aheads(extents: Sequence[Extent], max_gap_bytes: int) -> list[int]:
    """The offset up to which to read ahead for each extent, so that small extents close behind it are read with it."""
    aheads, ahead, next_start = [0] * len(extents), 0, -1
    for index in range(len(extents) - 1, -1, -1):
        extent = extents[index]
        is_near = 0 <= next_start - extent.file_stop <= max_gap_bytes
        small = extent.length_bytes <= _SMALL_BLOB_BYTES
        ahead = 0 if not small else ahead if is_near and ahead else extent.file_stop
        aheads[index], next_start = ahead, extent.file_start
    return aheads


def _check_same_scale(chunk: torch.Tensor, place: torch.Tensor, what: str) -> None:
    """Of a quantized tensor only the integers are copied: they mean nothing under another scale."""
    found, expected = (_scale_of(tensor) for tensor in (chunk, place))
    if found != expected:
        raise CheckpointMismatchError(
            f"reading {what}: it is stored {found}, the tensor to be filled is {expected}; load into a tensor of the "
            "same quantization, or save what dequantize() gives"
        )


def _scale_of(tensor: torch.Tensor) -> str:
    if not tensor.is_quantized:
        return "not quantized"
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"quantized with scale {tensor.q_scale()} and zero point {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"quantized by dim {tensor.q_per_channel_axis()} with scales {scales} and zero points {zeros}"


@dataclass(frozen=True, slots=True)
class _ChunkFill:
    file: CheckedFile
    read: ChunkRead
    ahead: int

    def fill(self) -> None:
        read, start = self.read, self.read.extent.file_start
        if read.is_bare:
            for destination in read.destinations:
                self._fill_destination(None, destination)
            return None
        frame = frame_of(read.dtype, read.shape)
        if frame is None or frame.blob_bytes != read.extent.length_bytes:
            return self._fill_parsed()
        head = self.file.view(start, start + len(frame.head), read.what, ahead=self.ahead)
        if head != frame.head:
            return self._fill_parsed()
        for destination in read.destinations:
            self._fill_destination(frame, destination)
        return None

    def _fill_parsed(self) -> None:
        extent = self.read.extent
        blob = bytes(self.file.view(extent.file_start, extent.file_stop, self.read.what, ahead=self.ahead))
        chunk = read_tensor(blob, self.read.dtype, self.read.shape, self.read.what)
        for destination in self.read.destinations:
            _check_same_scale(chunk, destination.place, self.read.what)
            destination.place.copy_(chunk[destination.box.slices()])

    def _fill_destination(self, frame: Frame | None, destination: Destination) -> None:
        first = self.read.extent.file_start + (len(frame.head) if frame else 0)
        is_whole = destination.box.shape == self.read.shape
        memory = _memory_of(destination.place, self.read.dtype) if is_whole else None
        if memory is not None:
            self.file.read_into(first, memory, self.read.what)
            if frame is not None and not self.file.is_checked:
                self._check_against_tail(frame, first, memory)
            return
        itemsize = torch_dtype(self.read.dtype).itemsize
        if self._fill_runs(destination, first, itemsize):
            return
        max_elements, max_gap = WINDOW_BYTES // itemsize, self.file.worthwhile_gap_bytes // itemsize
        for slab in plan_slabs(self.read.shape, destination.box, max_elements, max_gap):
            self._fill_slab(slab, destination, first, itemsize)

    def _fill_runs(self, destination: Destination, first: int, itemsize: int) -> bool:
        """Read the runs of a box one by one, where they go side by side and are worth it; whether they are."""
        memory = None if destination.box.is_empty else _memory_of(destination.place, self.read.dtype)
        if memory is None:
            return False
        runs = find_runs(self.read.shape, destination.box)
        if runs.gap * itemsize <= self.file.worthwhile_gap_bytes:
            return False
        starts: list[int] = (runs.starts * itemsize + first).tolist()
        self.file.read_runs(starts, runs.length * itemsize, memory, self.read.what)
        return True

    def _fill_slab(self, slab: Slab, destination: Destination, first: int, itemsize: int) -> None:
        start, stop = first + slab.start * itemsize, first + slab.stop * itemsize
        place = destination.place[slab.box.relative_to(destination.box).slices()].detach()
        memory = _memory_of(place, self.read.dtype) if slab.is_run else None
        if memory is not None:
            self.file.read_into(start, memory, self.read.what)
            return

        def use(content: memoryview) -> None:
            self._spread(content, slab, place, itemsize)

        self.file.use_later(start, stop, self.read.what, use)

    def _spread(self, content: memoryview, slab: Slab, place: torch.Tensor, itemsize: int) -> None:
        """Copy the elements of a slab out of the run that covers it."""
        strides = row_major_strides(self.read.shape)
        if _is_plain(place, self.read.dtype) and itemsize in _WORDS:
            # Same elements, other strides: NumPy moves words from any address, without threads for a small copy.
            words = np.frombuffer(content, _WORDS[itemsize])
            steps = [stride * itemsize for stride in strides]
            words_of(place)[...] = as_strided(words, slab.box.shape, steps, writeable=False)
            return
        elements = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(torch_dtype(self.read.dtype))
        place.copy_(elements.as_strided(slab.box.shape, strides))

    def _check_against_tail(self, frame: Frame, first: int, memory: memoryview) -> None:
        """Check the CRC of the zip file, for reads of all elements of a blob that has no block checksums."""
        self.file.wait()
        stop = first + len(memory)
        tail = self.file.view(stop, stop + len(frame.tail_template), self.read.what, ahead=self.ahead)
        expected, found = frame.stored_crc(tail), crc32(memory)
        if expected not in (0, found):
            raise CheckpointFormatError(
                "bad-blob",
                f"reading {self.read.what}: its elements have checksum {found:08x}, expected {expected:08x}; the "
                "checkpoint is damaged, use another one",
            )


def _is_plain(place: torch.Tensor, dtype: str) -> bool:
    """Whether the tensor's memory holds the very words that are stored."""
    return (
        place.dtype == torch_dtype(dtype) and place.device.type == "cpu" and not place.is_neg() and not place.is_conj()
    )


def _memory_of(place: torch.Tensor, dtype: str) -> memoryview | None:
    """The bytes of a tensor that holds nothing else in between and needs no cast, or None."""
    is_direct = _is_plain(place, dtype) and place.is_contiguous()
    return memory_of(place) if is_direct else None
