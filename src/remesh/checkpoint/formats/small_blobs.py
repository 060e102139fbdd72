"""Batched reads of small tensors: many with one read, equal dtypes and shapes with one copy.

Definitions. A tensor is *small* when calls for it alone would cost more than its bytes; here it is wanted whole and
lies whole in one blob. Tensors are *alike* when dtype and shape, and so the frames of their blobs, are the same.

1. Small tensors that lie close together in a file are read, and their blocks checked, with one *window*.
2. The beginnings of alike blobs are compared with the frame side by side, and their elements put side by side.
3. These are copied into the tensors that want them, whatever dtype, device and strides those have.

What fails in a window is read again one by one, so that the error names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats.blob_frame import Frame, frame_of
from remesh.checkpoint.formats.index_columns import ColumnTensors
from remesh.checkpoint.plan.manifest import StoredTensor
from remesh.checkpoint.storage.checked_file import WINDOW_BYTES, CheckedFile
from remesh.foundation.torch_private import foreach_copy
from remesh.layout.from_torch import torch_dtype

SMALL_BYTES = 64 << 10
"""Of elements."""


class Small(NamedTuple):
    """A small tensor to be filled."""

    file_start: int
    """First byte of its blob."""
    frame: Frame
    key: str
    place: torch.Tensor
    """Of the stored shape; any device, dtype and strides."""

    @property
    def file_stop(self) -> int:
        """One past the last byte of its blob."""
        return self.file_start + self.frame.blob_bytes


def find_small(
    stored: Mapping[str, StoredTensor], wanted: Sequence[tuple[str, torch.Tensor]]
) -> tuple[dict[str, list[Small]], list[int]]:
    """The small blobs among the wanted ones, by file and in order of offset, and the numbers of the other blobs.

    Only of an index in columns is it known without looking closer which tensors lie whole in a blob.
    """
    if not isinstance(stored, ColumnTensors):
        return {}, list(range(len(wanted)))
    whole = stored.whole
    found: dict[str, list[Small]] = {}
    others: list[int] = []
    for number, (key, place) in enumerate(wanted):
        entry = whole.get(key)
        frame = frame_of(entry[0], entry[1]) if entry is not None and entry[1] == place.shape else None
        if frame is None or entry is None or frame.num_bytes > SMALL_BYTES or entry[2][2] != frame.blob_bytes:
            others.append(number)
            continue
        file, start, _ = entry[2]
        found.setdefault(file, []).append(Small(start, frame, key, place))
    for of_file in found.values():
        of_file.sort(key=lambda small: small.file_start)
    return found, others


def read_small(file: CheckedFile, wanted: Sequence[Small], read_alone: Callable[[Small], None]) -> None:
    """Fill all of them, which are in order of their place; ``read_alone`` does one with no help from others."""
    for part in _windows(wanted, file.worthwhile_gap_bytes):
        first, stop = part[0].file_start, part[-1].file_stop
        content = None
        if file.is_checked:
            with suppress(CheckpointFormatError):  # raised again where the damaged one is read
                content = np.frombuffer(file.view(first, stop, f"tensor {part[0].key!r} and others"), np.uint8)
        alike: dict[int, list[Small]] = {}
        for small in part:
            alike.setdefault(id(small.frame), []).append(small)
        for group in alike.values():
            if content is None or not _fill(content, first, group):
                for small in group:
                    read_alone(small)


def _windows(wanted: Sequence[Small], max_gap_bytes: int) -> Iterator[list[Small]]:
    part: list[Small] = []
    for small in wanted:
        is_far = part and small.file_start - part[-1].file_stop > max_gap_bytes
        if is_far or (part and small.file_stop - part[0].file_start > WINDOW_BYTES):
            yield part
            part = []
        part.append(small)
    if part:
        yield part


def _fill(content: npt.NDArray[np.uint8], first: int, alike: Sequence[Small]) -> bool:
    """Fill alike tensors from the content of a file from ``first`` on; whether their blobs begin as they should."""
    frame = alike[0].frame
    starts = [small.file_start - first for small in alike]
    blobs = _side_by_side(content, starts, frame.blob_bytes)
    head = len(frame.head)
    if not (blobs[:, :head] == np.frombuffer(frame.head, np.uint8)).all():
        return False
    elements = torch.from_numpy(blobs[:, head : head + frame.num_bytes].copy())
    values = elements.view(torch_dtype(frame.dtype)).view(len(alike), *frame.shape).unbind(0)
    with torch.inference_mode():  # where tensors of its own may be filled as well as all others
        foreach_copy([small.place for small in alike], values)
    return True


def _side_by_side(content: npt.NDArray[np.uint8], starts: Sequence[int], num_bytes: int) -> npt.NDArray[np.uint8]:
    """``[num_starts, num_bytes]``: a view where the starts follow each other evenly, else a copy."""
    last, count = starts[-1], len(starts)
    if last - starts[0] == (count - 1) * num_bytes and all(b - a == num_bytes for a, b in pairwise(starts)):
        return content[starts[0] : last + num_bytes].reshape(count, num_bytes)
    blobs = np.empty((count, num_bytes), np.uint8)
    for row, start in enumerate(starts):
        blobs[row] = content[start : start + num_bytes]
    return blobs
