"""Zip frame around a tensor's elements in its blob, byte for byte as ``torch.save`` writes it.

A blob is a zip archive of stored members. All of it but the elements and three checksums follows from dtype and
shape, so the frame is made once for each pair and only patched for each tensor; no tensor is pickled.

    data.pkl  .format_version  .storage_alignment  byteorder  data/0  |elements|  version  serialization_id  directory
    `------------------------- head ---------------------------------'          `------------- tail -----------------'

1. Every member's payload starts on a multiple of 64 bytes of the blob; a filler in its local header makes it so.
2. Checksums and sizes stand in a descriptor behind each payload, and again in the directory.
3. ``serialization_id`` is 20 digits for the members' names and 20 for a hash over their checksums.

The result equals that of ``torch.save`` in PyTorch 2.13 to the byte (held by a test), for row-major tensors that are
not empty and lie below the size at which zip needs wider numbers.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from remesh.foundation.checksums import crc32
from remesh.layout.from_torch import torch_dtype

LARGEST_BYTES = (1 << 32) - (1 << 20)
"""Above it zip needs wider numbers; such blobs are left to torch."""

_ALIGNMENT_BYTES = 64
_QUANTIZED = ("qint", "quint")
_NAMES_HASH = b"15728199511854643026"
_NAMES_CRC = crc32(_NAMES_HASH)
_WORD = (1 << 64) - 1
_FLAGS = 0x0808
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sQHHIIQQQQ4sIQI4sHHHHIIH")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Frame:
    """The blob of any tensor of one dtype and shape, without its elements."""

    dtype: str
    shape: tuple[int, ...]
    head: bytes
    """From the start of the blob to the first element."""
    num_bytes: int
    """Bytes of all elements, which follow the head. Invariant: 0 < ``num_bytes`` <= `LARGEST_BYTES`."""
    hash_before: int
    """Hash over the checksums of the members before the elements."""
    tail_template: bytes
    """From the last element to the end of the blob, with zeros for what depends on the elements."""
    crc_starts: tuple[int, int]
    """Where in the tail the checksum of the elements stands."""
    id_start: int
    """Where in the tail the 40 digits stand."""
    id_crc_starts: tuple[int, int]
    """Where in the tail the checksum of the digits stands."""
    blob_bytes: int = field(init=False)
    """Length of the whole blob."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blob_bytes", len(self.head) + self.num_bytes + len(self.tail_template))

    def tail(self, crc: int) -> bytes:
        """The bytes behind elements with this CRC-32."""
        combined = _combine(_combine(self.hash_before, crc), _VERSION_CRC)
        digits = _NAMES_HASH + b"%020d" % combined
        tail = bytearray(self.tail_template)
        for start in self.crc_starts:
            _CRC.pack_into(tail, start, crc)
        tail[self.id_start : self.id_start + len(digits)] = digits
        digits_crc = crc32(digits)
        for start in self.id_crc_starts:
            _CRC.pack_into(tail, start, digits_crc)
        return bytes(tail)

    def put_tails(self, crcs: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        """`tail` of many, into ``rows``: ``[num_crcs, bytes of a tail]``."""
        rows[:] = np.frombuffer(self.tail_template, np.uint8)
        elements = np.array(crcs, "<u4")
        combined = _combine_all(_combine_all(np.uint64(self.hash_before), elements.astype(np.uint64)), _VERSION_CRC)
        digits = _digits_of(combined)
        text = memoryview(digits).cast("B")  # type: ignore[arg-type]
        ids = np.array([crc32(text[at : at + 20], _NAMES_CRC) for at in range(0, len(text), 20)], "<u4")
        rows[:, self.id_start + len(_NAMES_HASH) :][:, :20] = digits
        for starts, values in ((self.crc_starts, elements), (self.id_crc_starts, ids)):
            for start in starts:
                rows[:, start : start + 4] = values.view(np.uint8).reshape(-1, 4)

    def stored_crc(self, tail: bytes | memoryview) -> int:
        """The checksum of the elements as a tail has it; 0 where the writer left it out."""
        crc: int = _CRC.unpack_from(tail, self.crc_starts[0])[0]
        return crc


_VERSION = b"3\n"
_VERSION_CRC = crc32(_VERSION)
_ID_DIGITS = 40


@lru_cache(maxsize=4096)
def frame_of(dtype: str, shape: tuple[int, ...]) -> Frame | None:
    """The frame of a row-major tensor, or None where `torch.save` has to write the blob: empty, huge or quantized."""
    num_bytes = math.prod(shape) * torch_dtype(dtype).itemsize
    if not 0 < num_bytes <= LARGEST_BYTES or dtype.startswith(_QUANTIZED):
        return None
    archive = _Archive()
    for name, content in (
        ("data.pkl", _pickle_of(dtype, shape)),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % _ALIGNMENT_BYTES),
        ("byteorder", b"little"),
    ):
        archive.add(name, content)
    hash_before = 0
    for member in archive.members:
        hash_before = _combine(hash_before, member.crc)
    elements = archive.open("data/0", num_bytes)
    head = bytes(archive.content)
    archive.skip(num_bytes)
    archive.close(elements)
    archive.add("version", _VERSION)
    digits = archive.add(".data/serialization_id", _NAMES_HASH.ljust(_ID_DIGITS, b"0"))
    directory_starts = archive.finish()
    before = len(head)
    return Frame(
        dtype,
        shape,
        head,
        num_bytes,
        hash_before,
        bytes(archive.content[before:]),
        (elements.stop - num_bytes + 4 - before, directory_starts[elements.name] - num_bytes + 16 - before),
        digits.payload_start - num_bytes - before,
        (digits.stop - num_bytes + 4 - before, directory_starts[digits.name] - num_bytes + 16 - before),
    )


def _combine(seed: int, value: int) -> int:
    return seed ^ ((value + 0x9E3779B9 + ((seed << 6) & _WORD) + (seed >> 2)) & _WORD)


def _combine_all(seed: Any, value: Any) -> Any:
    """`_combine` of arrays of words, whose sums lose what does not fit."""
    return seed ^ (value + np.uint64(0x9E3779B9) + (seed << np.uint64(6)) + (seed >> np.uint64(2)))


def _digits_of(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """``[num_values, 20]``: the decimal digits of each, as text."""
    digits = np.empty((len(values), 20), np.uint8)
    for column in range(19, -1, -1):
        values, digit = np.divmod(values, np.uint64(10))
        digits[:, column] = digit
    return digits + np.uint8(ord("0"))


@dataclass(slots=True)
class _Member:
    name: bytes
    start: int
    payload_start: int
    num_bytes: int
    crc: int = 0

    @property
    def stop(self) -> int:
        return self.payload_start + self.num_bytes


class _Archive:
    """A zip archive under construction, of which one payload may be left out of the content."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.members: list[_Member] = []
        self._skipped_bytes = 0

    def _tell(self) -> int:
        return len(self.content) + self._skipped_bytes

    def open(self, short_name: str, num_bytes: int) -> _Member:
        name = b"archive/" + short_name.encode()
        start = self._tell()
        unfilled = start + _LOCAL.size + len(name) + 4
        num_filler = -unfilled % _ALIGNMENT_BYTES
        self.content += _LOCAL.pack(b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), num_filler + 4)
        self.content += name + b"FB" + struct.pack("<H", num_filler) + b"Z" * num_filler
        return _Member(name, start, unfilled + num_filler, num_bytes)

    def skip(self, num_bytes: int) -> None:
        self._skipped_bytes += num_bytes

    def close(self, member: _Member) -> None:
        self.content += _DESCRIPTOR.pack(b"PK\7\x08", member.crc, member.num_bytes, member.num_bytes)
        self.members.append(member)

    def add(self, short_name: str, payload: bytes) -> _Member:
        member = self.open(short_name, len(payload))
        member.crc = crc32(payload)
        self.content += payload
        self.close(member)
        return member

    def finish(self) -> dict[bytes, int]:
        """Append the directory; returns where each member's entry begins."""
        first, starts = self._tell(), {}
        for member in self.members:
            starts[member.name] = self._tell()
            sizes = (member.crc, member.num_bytes, member.num_bytes)
            numbers = (len(member.name), 0, 0, 0, 0, 0, member.start)
            self.content += _CENTRAL.pack(b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, *sizes, *numbers) + member.name
        stop, count = self._tell(), len(self.members)
        wide = (b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, stop - first, first)
        narrow = (b"PK\5\6", 0, 0, count, count, stop - first, first, 0)
        self.content += _END.pack(*wide, b"PK\6\7", 0, stop, 1, *narrow)
        return starts


class _StoragePickler(pickle.Pickler):
    """Pickles a tensor's storage as a reference by number, in the words of ``torch.save``."""

    def __init__(self, file: io.BytesIO, num_elements: int) -> None:
        super().__init__(file, protocol=2)
        self._num_elements = num_elements

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
        elif isinstance(obj, torch.UntypedStorage):
            kind = torch.storage.UntypedStorage
        else:
            return None
        return "storage", kind, "0", "cpu", self._num_elements


def _pickle_of(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The ``data.pkl`` of a row-major tensor, made from an empty one."""
    kind = torch_dtype(dtype)
    rebuild, arguments = torch.empty(0, dtype=kind, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]
    storage, offset, _, _, *rest = arguments
    is_typed = isinstance(storage, torch.storage.TypedStorage)
    file = io.BytesIO()
    pickler = _StoragePickler(file, math.prod(shape) * (1 if is_typed else kind.itemsize))
    strides = torch.empty(shape, dtype=kind, device="meta").stride()
    pickler.dump(_Reduced(rebuild, (storage, offset, shape, strides, *rest)))
    return file.getvalue()


class _Reduced:
    """Pickles as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in one row, sharing its memory.

    A dim of one element may have any stride and the tensor be contiguous for it; a view of bytes wants a stride of 1.

    >>> bytes_of(torch.zeros(8, dtype=torch.int16).as_strided((1,), (3,)))
    tensor([0, 0], dtype=torch.uint8)
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _TensorMemory:
    """Memory of a tensor, which it keeps, as NumPy asks for it."""

    def __init__(self, tensor: torch.Tensor, word: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": word,
            "shape": shape,
            "strides": strides,
        }


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU. Its storage can be resized afterwards, as not after ``numpy()``."""
    return np.asarray(_TensorMemory(tensor, "|u1", (tensor.nbytes,), (1,))).data


def words_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a tensor of the CPU as unsigned words, sharing its memory as `memory_of` does."""
    size = tensor.element_size()
    return np.asarray(
        _TensorMemory(tensor, f"=u{size}", tuple(tensor.shape), tuple(size * step for step in tensor.stride()))
    )
