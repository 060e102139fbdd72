"""How does one tensor or object become bytes, and come back safely?

A *blob* is one complete ``torch.save`` file. Blobs of objects hold a list with one element per local object of
that name. Reading allows what ``torch.load(weights_only=True)`` allows, NumPy arrays, namespaces and what the program
has registered with ``torch.serialization.add_safe_globals``; whatever cannot be read back is refused when it is saved.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import torch

from remesh.checkpoint.errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.formats.blob_frame import Frame, frame_of
from remesh.checkpoint.storage.data_file import DataFile
from remesh.checksums import crc32
from remesh.layout.from_torch import dtype_name, torch_dtype

_ALIGNED_BYTES = 256 << 10

SAFE_GLOBALS = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name not in ("ObjectDType", "StringDType")),
    Namespace,
    SimpleNamespace,
]
"""What pickles of arrays and scalars of plain numbers name, and of a program's arguments; building them runs no foreign
code, since both namespaces are nothing but attributes."""

_PLAIN = frozenset((bool, int, float, str, type(None)))


def start_blob(file: DataFile, dtype: str, shape: tuple[int, ...]) -> int:
    """Where the next blob begins: a large one so that its elements begin on a boundary of blocks."""
    frame = frame_of(dtype, shape)
    if frame is not None and frame.num_bytes >= _ALIGNED_BYTES:
        file.align(len(frame.head))
    return file.tell()


def write_tensor(tensor: torch.Tensor, file: DataFile) -> None:
    """Append the blob of a tensor: its elements only, row-major, whatever storage it is a view of."""
    plain = tensor.detach().cpu().contiguous()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    frame = frame_of(dtype_name(plain.dtype), tuple(plain.shape))
    if frame is None:
        if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        torch.save(plain, cast(IO[bytes], file))  # it only writes
        return
    file.write_blob(frame.head, plain.reshape(-1).view(torch.uint8).numpy().data, frame.tail)


def write_tensor_in_parts(
    parts: Iterable[torch.Tensor], dtype: str, shape: tuple[int, ...], file: DataFile
) -> Iterator[int]:
    """Append the blob of a tensor that is given part by part, row-major; yields the bytes of each part.

    The parts of a tensor that only torch can write, being empty, quantized or huge, are put together first.
    """
    frame = frame_of(dtype, shape)
    if frame is None:
        found = [part.reshape(-1) for part in parts]
        whole = (torch.cat(found) if found else torch.empty(0, dtype=torch_dtype(dtype))).reshape(shape)
        write_tensor(whole, file)
        yield whole.nbytes
        return
    file.write(frame.head)
    crc = 0
    for part in parts:
        crc = file.write_elements(elements_of(part), crc)
        yield part.nbytes
    file.write(frame.tail(crc))


def elements_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of the elements of a tensor, row-major."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    elements: memoryview = plain.reshape(-1).view(torch.uint8).numpy().data
    return elements


def write_alike(tensors: Sequence[torch.Tensor], frame: Frame, file: DataFile) -> None:
    """Append the blobs of tensors that all have this frame and one device, built side by side."""
    with torch.no_grad():
        raw = elements_of(torch.stack(list(tensors)))
    starts = range(0, len(raw), frame.num_bytes)
    crcs = [crc32(raw[start : start + frame.num_bytes]) for start in starts]
    first, stop = len(frame.head), len(frame.head) + frame.num_bytes
    blobs = np.empty((len(tensors), frame.blob_bytes), np.uint8)
    blobs[:, :first] = np.frombuffer(frame.head, np.uint8)
    blobs[:, first:stop] = np.frombuffer(raw, np.uint8).reshape(len(tensors), -1)
    frame.put_tails(crcs, blobs[:, stop:])
    file.write(memoryview(blobs).cast("B"))  # type: ignore[arg-type]


def read_tensor(blob: bytes, dtype: str, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """The tensor of a blob, after checking that it is what the metadata says."""
    tensor = _load(blob, where)
    is_tensor = isinstance(tensor, torch.Tensor)
    found = (dtype_name(tensor.dtype), tuple(tensor.shape)) if is_tensor else type(tensor).__name__
    if found != (dtype, shape):
        raise CheckpointFormatError(
            "wrong-blob",
            f"reading {where}: expected a tensor of dtype {dtype} and shape {shape} as the metadata says, found "
            f"{found}; the checkpoint is damaged, use another one",
        )
    assert isinstance(tensor, torch.Tensor)
    return tensor


def dump_object(value: Any, name: str) -> bytes:
    """The blob of an object; `CheckpointMismatchError` when it could not be read back."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unsafe = [] if _is_plain(value) else _unsafe_globals_in(file)
    except (pickle.PicklingError, TypeError, AttributeError) as raised:
        raise CheckpointMismatchError(
            f"serialising {name}: expected values that can be pickled, found: {raised}; leave it out of the state dict "
            "or wrap it in LocalNonpersistentObject"
        ) from raised
    if unsafe:
        raise CheckpointMismatchError(
            f"serialising {name}: it holds instances of {', '.join(sorted(unsafe))}, which could not be loaded again "
            "safely; save plain values instead, or allow the class with torch.serialization.add_safe_globals in every "
            "program that saves or loads"
        )
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    """Whether a value is a nest of numbers and texts, whose pickle names no class at all."""
    kind = type(value)
    if kind is dict:
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    return kind in _PLAIN or (kind in (list, tuple) and all(map(_is_plain, value)))


def _unsafe_globals_in(file: io.BytesIO) -> list[str]:
    file.seek(0)
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)


def load_object(blob: bytes, where: str) -> Any:
    """The object of a blob, on the CPU."""
    return _load(blob, where)


def _load(blob: bytes, where: str) -> Any:
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as raised:
        raise CheckpointFormatError(
            "forbidden-global",
            f"reading {where}: it needs a class that is not known to be safe ({_first_line(raised)}); if the file is "
            "to be trusted, allow the class with torch.serialization.add_safe_globals",
        ) from raised
    except Exception as raised:  # a damaged blob raises almost anything
        raise CheckpointFormatError(
            "bad-blob",
            f"reading {where}: expected {len(blob)} bytes written by torch.save, found that they do not parse "
            f"({_first_line(raised)}); the checkpoint is damaged, use another one",
        ) from raised


def _first_line(raised: BaseException) -> str:
    return (str(raised).strip().splitlines() or [type(raised).__name__])[0][:200]
