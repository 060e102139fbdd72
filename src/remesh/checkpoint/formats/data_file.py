"""Data file of a checkpoint: blobs of tensors and objects, with a checksum of each block.

    | blob | blob | ... | blob | one CRC-32 per block | footer |
    '------- data bytes -------'------- trailer -------------'

The data bytes are cut into *blocks* of equal length, the last one shorter. The trailer stands behind the last blob,
where readers that go by offset and length never look. Its footer holds its offset, so it is found from the end.

The blob of a tensor is what ``torch.save`` would write: a frame around its elements (`blob_frame`), which wants their
CRC-32. For large tensors it is put together from those of the blocks. Small tensors that are alike go in together.

While a large file grows, one thread computes checksums and another lets what is written reach the disk, so that little
is left to wait for at the end.

The blob of an object is a ``torch.save`` file, too; it holds a list with one element per local object of that name.
Reading allows what ``torch.load(weights_only=True)`` allows, NumPy arrays, namespaces, buffers, paths and what the
program has registered with ``torch.serialization.add_safe_globals``; a value that could not be read back is refused
when it is saved.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import pickletools
import zipfile
from argparse import Namespace
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import groupby
from types import SimpleNamespace, TracebackType
from typing import IO, Any, Final, Protocol, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.formats.blob_frame import Frame, frame_of, memory_of
from remesh.checkpoint.formats.inert_objects import LOOK_UP, dump_with_stand_ins, find_stand_in, stand_ins_for
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import BLOCK_BYTES, Trailer
from remesh.checkpoint.storage.joined_checksums import join_blocks
from remesh.checkpoint.values.nests import name_of, nested_leaves
from remesh.foundation.checksums import crc32
from remesh.foundation.thread_pool import PooledExecutor
from remesh.layout.from_torch import dtype_name, torch_dtype

_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
SAFE_GLOBALS = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name not in ("ObjectDType", "StringDType")),
    Namespace,
    SimpleNamespace,
    bytes,  # named for empty ones alone
    io.BytesIO,
    *((kind, f"{module}.{kind.__name__}") for kind in _PATHS for module in ("pathlib", "pathlib._local")),
]
"""What pickles of arrays and scalars of plain numbers name, and of a program's arguments, buffers and paths; building
them runs no foreign code, since namespaces are nothing but attributes. Paths have moved to another module in Python."""

_TORCH_HEADS = (b"PK", b"\x80")
"""What the files of ``torch.save`` begin with: those of a zip archive, and the pickles of old releases."""
_PLAIN = frozenset((bool, int, float, str, type(None)))
_ALIGNED_BYTES = 256 << 10
_SMALL_BYTES = 64 << 10
"""Tensors up to this size cost more in calls than in bytes."""
_RUN_BYTES = 4 << 20

_FLUSH_BYTES = 1 << 20
_WRITE_BYTES = 8 << 20
_SYNC_BYTES = 32 << 20
_CHECKS: Final = PooledExecutor(8, "checksum")
_SYNCS: Final = PooledExecutor(8, "sync")


class Hasher(Protocol):
    """An object that computes a checksum of the whole file, as those of `hashlib` do."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""


class DataFile:
    """A data file being written, with a block table that grows along. A context manager; `finish` makes it durable."""

    def __init__(self, path: Location, hasher: Hasher | None = None) -> None:
        self._file = store_of(path).create(path)
        self._hasher = hasher
        self._pending = bytearray()  # from the last block boundary on; not yet in the file
        self._flushed_bytes = 0
        self._crcs = array("I")
        self._synced_bytes = 0
        self._syncs: list[Future[None]] = []
        self._checks: list[Future[None]] = []

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait([*self._checks, *self._syncs])
        self._file.close()

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._flushed_bytes + len(self._pending)

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes, without copying them where they are many; returns their number."""
        if len(content) >= _FLUSH_BYTES:
            self._write_through(memoryview(content))
            return len(content)
        self._pending += content
        if len(self._pending) >= _FLUSH_BYTES:
            self._flush(len(self._pending) // BLOCK_BYTES * BLOCK_BYTES)
        return len(content)

    def write_elements(self, content: memoryview, crc: int = 0) -> int:
        """Append bytes; returns their CRC-32, going on from ``crc``."""
        if len(content) < _FLUSH_BYTES:
            self.write(content)
            return crc32(content, crc)
        first = -len(self._pending) % BLOCK_BYTES
        crc = crc32(content[:first], crc)
        num_known, last = self._write_through(content)
        return crc32(content[last:], join_blocks(crc, np.array(self._crcs[num_known:], np.uint32), BLOCK_BYTES))

    def align(self, num_bytes: int) -> None:
        """Fill up, so that what follows after ``num_bytes`` more begins on a boundary of blocks."""
        self.write(bytes(-(self.tell() + num_bytes) % BLOCK_BYTES))

    def _write_through(self, content: memoryview) -> tuple[int, int]:
        """Append bytes, whole blocks of them straight from where they are.

        Returns how many blocks there were up to the first of these, and how many bytes are in blocks now.
        """
        first = -len(self._pending) % BLOCK_BYTES
        self._pending += content[:first]
        self._flush(len(self._pending))
        num_known = len(self._crcs)
        last = first + (len(content) - first) // BLOCK_BYTES * BLOCK_BYTES
        for start in range(first, last, _WRITE_BYTES):
            part = content[start : min(start + _WRITE_BYTES, last)]
            added = self._check_beside(self._add_blocks, part)  # while the operating system copies the bytes
            self._write_all(part)
            added.result()
            if self._flushed_bytes - self._synced_bytes >= _SYNC_BYTES:
                self._synced_bytes = self._flushed_bytes
                self._syncs.append(_SYNCS.submit(self._file.sync))
        self._pending += content[last:]
        return num_known, last

    def flush(self) -> None:
        """Do nothing: bytes are written when there are enough of them, and in `finish`. Some writers call it."""

    def finish(self) -> Trailer:
        """Append the trailer and let everything reach the disk."""
        data_bytes = self.tell()
        self._flush(len(self._pending))
        trailer = Trailer(BLOCK_BYTES, data_bytes, self._crcs)
        self._write_all(memoryview(trailer.encode()))
        for sync in self._syncs:  # a disk that failed reports it only once, perhaps there
            sync.result()
        self._file.finish()
        return trailer

    def _flush(self, num_bytes: int) -> None:
        with memoryview(self._pending) as pending, pending[:num_bytes] as whole:
            self._add_blocks(whole)
            self._write_all(whole)
        # Not cut in place: a profiler that looks at this thread's stack may still hold a view of it.
        self._pending = self._pending[num_bytes:]

    def _add_blocks(self, content: memoryview) -> None:
        starts = range(0, len(content), BLOCK_BYTES)
        self._crcs.extend([crc32(content[start : start + BLOCK_BYTES]) for start in starts])

    def _write_all(self, content: memoryview) -> None:
        self._flushed_bytes += len(content)
        if self._hasher is None:
            self._file.write(content)
            return
        hashed = self._check_beside(self._hasher.update, content)  # while the operating system copies the bytes
        self._file.write(content)
        hashed.result()

    def _check_beside(self, act: Callable[[memoryview], None], content: memoryview) -> Future[None]:
        """Give a thread a sum to compute; the caller waits for it before the next of its kind."""
        self._checks = [one for one in self._checks if not one.done()]
        self._checks.append(_CHECKS.submit(act, content))
        return self._checks[-1]


def write_data_file(
    path: Location,
    objects: Sequence[bytes],
    tensors: Sequence[torch.Tensor],
    progress: Callable[[int], None] | None = None,
    hasher: Hasher | None = None,
) -> list[tuple[int, int]]:
    """Write blobs of objects, then tensors, durably; returns where each lies: first byte and length.

    Tensors are on any device and of any strides. ``progress`` is called with the number of bytes after each of them,
    ``hasher`` all bytes of the file.
    """
    places: list[tuple[int, int]] = []
    with DataFile(path, hasher) as file:
        for blob in objects:
            file_start = file.tell()
            file.write(blob)
            places.append((file_start, file.tell() - file_start))
        for alike in _runs_of_alike(tensors):
            places += _put_alike(alike, file)
            if progress is not None:
                progress(file.tell())
        file.finish()
    return places


def _put_alike(alike: Sequence[torch.Tensor], file: DataFile) -> list[tuple[int, int]]:
    """Append the blobs of tensors of equal dtype, shape and device; where each lies."""
    kind = dtype_name(alike[0].dtype), tuple(alike[0].shape)
    frame = frame_of(*kind) if len(alike) > 1 else None
    if frame is not None:
        file_start = start_blob(file, *kind)
        write_alike(alike, frame, file)
        return [(file_start + number * frame.blob_bytes, frame.blob_bytes) for number in range(len(alike))]
    places = []
    for tensor in alike:
        file_start = start_blob(file, *kind)
        write_tensor(tensor, file)
        places.append((file_start, file.tell() - file_start))
    return places


def _runs_of_alike(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order; small ones of equal dtype, shape and device that follow each other come together."""
    for (dtype, shape, _), found in groupby(tensors, lambda tensor: (tensor.dtype, tensor.shape, tensor.device)):
        alike, num_bytes = list(found), shape.numel() * dtype.itemsize
        longest = -(-_RUN_BYTES // num_bytes) if 0 < num_bytes <= _SMALL_BYTES else 1
        for at in range(0, len(alike), longest):
            yield alike[at : at + longest]


def start_blob(file: DataFile, dtype: str, shape: tuple[int, ...]) -> int:
    """The offset of the next blob; the elements of a large blob begin on a block boundary."""
    frame = frame_of(dtype, shape)
    if frame is not None and frame.num_bytes >= _ALIGNED_BYTES:
        file.align(len(frame.head))
    return file.tell()


def write_tensor(tensor: torch.Tensor, file: DataFile) -> None:
    """Append the blob of a tensor: its elements only, row-major, whatever storage it is a view of."""
    plain = _plain(tensor)
    frame = frame_of(dtype_name(plain.dtype), tuple(plain.shape))
    if frame is None:
        if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        torch.save(plain, cast(IO[bytes], file))  # it only writes
        return
    file.write(frame.head)
    file.write(frame.tail(file.write_elements(memory_of(plain))))


def write_tensor_in_parts(
    parts: Iterable[torch.Tensor], dtype: str, shape: tuple[int, ...], file: DataFile
) -> Iterator[int]:
    """Append the blob of a tensor that is given part by part, row-major; yields the bytes of each part.

    The parts of a tensor that only torch can write, being empty, quantized or huge, are put together first.
    """
    frame = frame_of(dtype, shape)
    if frame is None:
        found = [part.reshape(-1) for part in parts]
        whole = (torch.cat(found) if found else torch.empty(0, dtype=torch_dtype(dtype), device="cpu")).reshape(shape)
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
    return memory_of(_plain(tensor))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


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
    """The tensor of a blob, after checking its dtype and shape against the metadata."""
    tensor = load_object(blob, where)
    is_tensor = isinstance(tensor, torch.Tensor)
    found = (dtype_name(tensor.dtype), tuple(tensor.shape)) if is_tensor else type(tensor).__name__
    if found != (dtype, shape):
        raise CheckpointFormatError(
            "wrong-blob",
            f"reading {where}: expected a tensor of dtype {dtype} and shape {shape} as in the metadata, found "
            f"{found}; the checkpoint is damaged, use another one",
        )
    assert isinstance(tensor, torch.Tensor)
    return tensor


def dump_object(value: Any, name: str) -> bytes:
    """The blob of an object; `CheckpointMismatchError` when it could not be read back.

    Stand-ins (`load_object`) are written as what they stand for.
    """
    file = io.BytesIO()
    try:
        is_plain = _is_plain(value)
        if not is_plain and find_stand_in(value) is not None:
            return dump_with_stand_ins(value)
        torch.save(value, file)
        if not is_plain:
            check_object(file.getvalue(), name)
    except (CheckpointMismatchError, MemoryError):
        raise
    except RecursionError as raised:
        raise CheckpointMismatchError(
            f"serialising {name}: a value holds itself in a tuple or an object, or values are nested too deeply, "
            "expected a tree; leave the reference to the outer one out"
        ) from raised
    except Exception as raised:  # whatever the classes of a program raise when they are pickled
        raise CheckpointMismatchError(
            f"serialising {name}: expected values that can be pickled, found: {raised}; leave it out of the state dict "
            "or wrap it in LocalNonpersistentObject"
        ) from raised
    return file.getvalue()


def dump_common(common: dict[str, Any]) -> bytes:
    """The common data serialised; `CheckpointMismatchError`, with its place, for what could not be loaded again."""
    name = "the common data"
    try:
        return dump_object(common, name)
    except CheckpointMismatchError:
        for path, leaf in nested_leaves(common):
            if type(leaf) not in _PLAIN:
                dump_object(leaf, f"{name} at {name_of(path)!r}")
        raise  # of a key


def check_object(blob: bytes, name: str) -> None:
    """Raise `CheckpointMismatchError` for a blob of an object that `load_object` would not read back as it is."""
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(blob))
    if LOOK_UP in unsafe:
        raise CheckpointMismatchError(
            f"serialising {name}: it holds a member of an enumeration, which this release of Python writes as a call "
            "of getattr, and no load should allow that; save its value instead, or use a later Python"
        )
    if unsafe:
        raise CheckpointMismatchError(
            f"serialising {name}: it holds instances of {', '.join(sorted(unsafe))}, which could not be loaded again "
            "safely; save plain values instead, or allow the class with torch.serialization.add_safe_globals in every "
            "program that saves or loads"
        )
    if _holds_dtensor(blob):
        raise CheckpointMismatchError(
            f"serialising {name}: it holds a DTensor in a tuple or another object, of which only this rank's part "
            "would be stored; put it into a dict or a list"
        )
    try:
        load_object(blob, name)
    except CheckpointFormatError as raised:
        raise CheckpointMismatchError(
            f"serialising {name}: it could not be loaded again ({reason_of(raised.__cause__ or raised)}); save plain "
            "values instead"
        ) from raised


def _holds_dtensor(blob: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        (program,) = (archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    return any(
        code.name == "GLOBAL" and argument == f"{DTensor.__module__} DTensor"
        for code, argument, _ in pickletools.genops(program)
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is a nest of numbers and texts, whose pickle names no class at all."""
    kind = type(value)
    if kind is dict:
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    return kind in _PLAIN or (kind in (list, tuple) and all(map(_is_plain, value)))


def load_object(blob: bytes, where: str, *, with_stand_ins: bool = False) -> Any:
    """The object of a blob, on the CPU.

    A class that is not known to be safe is a `CheckpointFormatError`, or its objects are stand-ins, as asked for.
    """
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            unknown = stand_ins_for(io.BytesIO(blob)) if with_stand_ins else []
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *unknown]):
            return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as raised:
        if f"GLOBAL {LOOK_UP.removeprefix('builtins.')} " in str(raised):
            raise CheckpointFormatError(
                "forbidden-global",
                f"reading {where}: it holds a member of an enumeration, which an early release of Python 3.11 wrote as "
                "a call of getattr, and no load should allow that; save its value instead, or use a later Python",
            ) from raised
        if not blob.startswith(_TORCH_HEADS):
            raise CheckpointFormatError(
                "bad-blob",
                f"reading {where}: expected {len(blob)} bytes written by torch.save, found others (they begin with "
                f"{blob[:8]!r}); it is damaged, or was saved in another format, such as torch's "
                "SerializationFormat.SAFETENSORS: save with the default one",
            ) from raised
        raise CheckpointFormatError(
            "forbidden-global",
            f"reading {where}: it needs a class that is not known to be safe ({reason_of(raised)}); if the file is "
            "to be trusted, allow the class with torch.serialization.add_safe_globals",
        ) from raised
    except Exception as raised:  # a damaged blob raises almost anything
        raise CheckpointFormatError(
            "bad-blob",
            f"reading {where}: expected {len(blob)} bytes written by torch.save, which cannot be parsed "
            f"({reason_of(raised)}); the checkpoint is damaged, use another one",
        ) from raised


def reason_of(raised: BaseException) -> str:
    """One line of what torch raised when it loaded: the one that names the class, where there is one."""
    lines = [line.strip() for line in str(raised).splitlines() if line.strip()] or [type(raised).__name__]
    return next((line for line in lines if "Unsupported" in line), lines[0])[:200]
