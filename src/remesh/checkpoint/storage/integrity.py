"""Checksums of every file of a checkpoint: written, read and verified.

Each data file ends in a table of checksums of its blocks, computed while it was written (`Trailer`).
One file, `CHECKSUMS_FNAME`, holds the size and CRC-32 of the small files and of each data file's table, and ends in
its own CRC-32. It is written before the commit. A load checks this file, the small files, the tables of the data
files it opens and exactly the blocks it reads. A checkpoint of another writer has no such file and is not checked.

Formats whose files may hold nothing but elements keep the tables of all files in one, `BLOCKS_FNAME`.

`integrity.json` is an option beside it: SHA-256 of every file, for people who keep such sums elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointingException
from remesh.checkpoint.storage import Location, RangedFile, store_of
from remesh.foundation.checksums import crc32

CHECKSUMS_FNAME = ".remesh-checksums"
BLOCKS_FNAME = ".remesh-blocks"
_SMALL = (".metadata", ".remesh-index", "common.pt", BLOCKS_FNAME)
"""Files that are summed up as wholes."""
SHA256_FNAME = "integrity.json"

TABLE_BLOCK_BYTES = 64 << 10
"""Of the files in `BLOCKS_FNAME`, which is text."""

_VERSION = 1
_DATA, _WHOLE, _BLOCKS = "data", "whole", "blocks"
_READ_BYTES = 4 << 20
BLOCK_BYTES = 4 << 10
"""Of data files. A page: small enough that a few columns of a matrix are read without the rest; the table is 1/1024 of
the data."""
_MAGIC = b"remeshCK"
_FOOTER = struct.Struct("<8sIQI")
_FOOTER_CRC = struct.Struct("<I")
_END_BYTES = _FOOTER.size + _FOOTER_CRC.size
_OF_STRANGE_BYTES = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, struct.error),
)
"""What bytes raise in a reader that expects others."""


@contextmanager
def parsing(reason: str, doing: str, expected: str, hint: str = "") -> Iterator[None]:
    """Give what strange bytes make their reader raise in the block one form, `CheckpointFormatError`."""
    try:
        yield
    except CheckpointingException:
        raise
    except (OSError, *_OF_STRANGE_BYTES) as raised:
        found = f"{raised!r:.200}" + (hint and f"; {hint}")
        raise CheckpointFormatError(reason, f"{doing}: expected {expected}, found: {found}") from raised


@dataclass(frozen=True, slots=True)
class Trailer:
    """Checksums of a data file."""

    block_bytes: int
    data_bytes: int
    """Length of the file without the trailer."""
    crcs: array[int]
    """CRC-32 of each block, in order."""

    @classmethod
    def of(cls, content: bytes | memoryview, block_bytes: int) -> Trailer:
        """The checksums of a file with that content."""
        view = memoryview(content)
        starts = range(0, len(view), block_bytes)
        return cls(block_bytes, len(view), array("I", [crc32(view[at : at + block_bytes]) for at in starts]))

    @property
    def num_bytes(self) -> int:
        """Length of the trailer in the file."""
        return len(self.crcs) * 4 + _END_BYTES

    def encode(self) -> bytes:
        """The trailer as it stands in the file."""
        table = self.crcs.tobytes()
        footer = _FOOTER.pack(_MAGIC, self.block_bytes, self.data_bytes, crc32(table))
        return table + footer + _FOOTER_CRC.pack(crc32(footer))


@dataclass(frozen=True, slots=True)
class SummedFile:
    """One file."""

    kind: str
    """``"data"``: the checksum is that of the trailer; ``"whole"``: of all bytes; ``"blocks"``: see ``table``."""
    num_bytes: int
    crc: int
    table: Trailer | None = None
    """Checksums of the blocks of a file that has no trailer, from `BLOCKS_FNAME`."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """Content of `CHECKSUMS_FNAME`; without entries for a checkpoint of another writer."""

    directory: Location
    entries: Mapping[str, SummedFile]

    @property
    def identity(self) -> str:
        """Identity of this checkpoint, equal under any path; the directory's name where there are no sums."""
        if not self.entries:
            return self.directory.name
        sums = sorted((name, one.num_bytes, one.crc) for name, one in self.entries.items() if one.table is None)
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def trailer_of(self, name: str) -> Trailer | None:
        """The block table of a data file, confirmed; None when the file has no entry."""
        entry = self.entries.get(name)
        if entry is None or entry.kind == _WHOLE:
            return None
        path = self.directory / name
        self._check_size(name, entry)
        if entry.table is not None:
            return entry.table
        content = read_trailer_bytes(path)
        self._check_crc(path, crc32(content), entry, "the checksums at its end")
        return decode_trailer(content)

    def check_whole(self, *names: str) -> None:
        """Raise `CheckpointFormatError` unless these files, where they have an entry, are as they were written."""
        for name in names:
            entry = self.entries.get(name)
            path = self.directory / name
            if entry is None or entry.kind != _WHOLE:
                continue
            try:
                found = _look_through(path)
            except (FileNotFoundError, IsADirectoryError):
                continue  # left to its reader to report: what it is needed for is known there
            check_length(path, entry.num_bytes, found.num_bytes)
            self._check_crc(path, found.crc, entry, "the file")

    def read(self, name: str) -> bytes:
        """All of a file that is not a data file; `CheckpointFormatError` unless it is as it was written."""
        path = self.directory / name
        entry = self.entries.get(name)
        if entry is not None:
            self._check_size(name, entry)
        content = store_of(path).read(path)
        if entry is not None and entry.table is not None:
            found = crc32(table_of(content).crcs.tobytes())
            self._check_crc(path, found, SummedFile(_BLOCKS, 0, crc32(entry.table.crcs.tobytes())), "the file")
        elif entry is not None:
            self._check_crc(path, crc32(content), entry, "the file")
        return content

    def check_sizes(self, names: Iterable[str] | None = None) -> None:
        """Raise `CheckpointFormatError` unless these files, or all, are there in their full length."""
        for name in self.entries if names is None else names:
            if name in self.entries:
                self._check_size(name, self.entries[name])

    def _check_size(self, name: str, entry: SummedFile) -> None:
        path = self.directory / name
        check_length(path, entry.num_bytes, store_of(path).size_of(path))

    def _check_crc(self, path: Location, found: int, entry: SummedFile, what: str) -> None:
        if found != entry.crc:
            raise CheckpointFormatError(
                "checksum",
                f"checking {path}: {what} has checksum {found:08x}, expected {entry.crc:08x}; the checkpoint is "
                "damaged, use another one",
            )


def check_length(path: Location, expected: int, found: int | None, *, may_be_longer: bool = False) -> None:
    """Raise `CheckpointFormatError` unless a file has that length; None when it is not there."""
    if found is None or found < expected or (found > expected and not may_be_longer):
        raise CheckpointFormatError(
            "missing-file" if found is None else "truncated" if found < expected else "checksum",
            f"checking file {path}: expected {'at least ' * may_be_longer}{expected} bytes, found "
            f"{'no such file' if found is None else found}; the checkpoint is damaged, use another one",
        )


def encode_checksums(where: Mapping[str, Location]) -> bytes:
    """The content of `CHECKSUMS_FNAME` for files, by the name that each has or is to have in its checkpoint."""
    entries = {}
    for name, path in where.items():
        if name.endswith(".distcp"):
            entries[name] = [_DATA, store_of(path).size_of(path), crc32(read_trailer_bytes(path))]
        elif name in _SMALL:
            found = _look_through(path)
            entries[name] = [_WHOLE, found.num_bytes, found.crc]
    content = json.dumps({"version": _VERSION, "files": entries}, indent=0).encode() + b"\n"
    return content + b"%08x\n" % crc32(content)


def replace_checksums(directory: Location) -> None:
    """Put `CHECKSUMS_FNAME` into a complete checkpoint, for the files that are there, by one process."""
    content = encode_checksums({name: directory / name for name in _sizes(directory)})
    store_of(directory).put(directory / CHECKSUMS_FNAME, content)


def read_checksums(directory: Location) -> Checksums:
    """The checksums of a checkpoint, confirmed against their own; no entries when the file is not there."""
    path = directory / CHECKSUMS_FNAME
    try:
        content = store_of(path).read(path)
    except FileNotFoundError:
        return Checksums(directory, {})
    body, ending = content[:-9], content[-9:]
    if ending != b"%08x\n" % crc32(body):
        raise CheckpointFormatError(
            "checksum",
            f"reading {path}: expected the file to end in its own checksum {crc32(body):08x}, found {ending!r}; it is "
            "damaged, use another checkpoint",
        )
    with _parsing_checksums(path):
        files = _checked_version(body)["files"]
        entries = {plain_name(name): _entry(values) for name, values in files.items()}
    checksums = Checksums(directory, entries)
    return Checksums(directory, {**entries, **_read_blocks(checksums)}) if BLOCKS_FNAME in entries else checksums


def table_of(content: bytes | memoryview) -> Trailer:
    """Checksums of the blocks of a file with that content, for `BLOCKS_FNAME`."""
    return Trailer.of(content, TABLE_BLOCK_BYTES)


def write_blocks(path: Location, tables: Mapping[str, Trailer]) -> None:
    """Write `BLOCKS_FNAME` for files without trailers, named relative to the directory; called by one rank.

    It lasts when the store has settled it.
    """
    files = {name: [one.data_bytes, base64.b64encode(one.crcs.tobytes()).decode()] for name, one in tables.items()}
    content = json.dumps({"version": _VERSION, "block_bytes": TABLE_BLOCK_BYTES, "files": files}, indent=0).encode()
    store_of(path).write_soon(path, content)


def files_in_blocks(path: Location) -> list[str]:
    """The files whose sums `write_blocks` has written."""
    return list(json.loads(store_of(path).read(path))["files"])


def _read_blocks(checksums: Checksums) -> dict[str, SummedFile]:
    path = checksums.directory / BLOCKS_FNAME
    with _parsing_checksums(path):
        checksums.check_whole(BLOCKS_FNAME)
        found = _checked_version(store_of(path).read(path))
        return {_inner_name(name): _table_entry(found["block_bytes"], *row) for name, row in found["files"].items()}


def _parsing_checksums(path: Location) -> AbstractContextManager[None]:
    hint = "the file is foreign or of a later version"
    return parsing("bad-checksums", f"reading {path}", f"checksums of version {_VERSION}", hint)


def _checked_version(content: bytes) -> Any:
    found = json.loads(content)
    if found["version"] != _VERSION:
        raise ValueError(f"version {found['version']!r}")
    return found


def _table_entry(block_bytes: int, num_bytes: int, table: str) -> SummedFile:
    crcs = array("I", base64.b64decode(table, validate=True))
    if type(block_bytes) is not int or type(num_bytes) is not int or len(crcs) != -(-num_bytes // block_bytes):
        raise ValueError(f"{len(crcs)} checksums of {num_bytes!r} bytes in blocks of {block_bytes!r}")
    return SummedFile(_BLOCKS, num_bytes, 0, Trailer(block_bytes, num_bytes, crcs))


def write_sha256_manifest(directory: Location, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write `SHA256_FNAME`: SHA-256 of every file of the directory. Called by one rank, after the commit.

    ``known`` are sums that were computed while files were written; those files are not read again.
    """
    names = [name for name in _sizes(directory) if name != SHA256_FNAME]
    files = {name: known[name] if name in known else _sha256_of(directory / name) for name in names}
    content = json.dumps({"algorithm": "sha256", "files": files}, indent=2).encode()
    store_of(directory).put(directory / SHA256_FNAME, content)


def check_sha256_manifest(directory: Location) -> None:
    """Raise `CheckpointFormatError` unless `SHA256_FNAME` is there and every file that it names has its sum."""
    path = directory / SHA256_FNAME
    hint = "save with verify_integrity, or load without it"
    with parsing("bad-integrity", f"reading {path}", "SHA-256 sums of the checkpoint's files", hint):
        found = json.loads(store_of(path).read(path))
        if found["algorithm"] != "sha256":
            raise ValueError(f"algorithm {found['algorithm']!r}")
        files = {plain_name(name): str(value) for name, value in found["files"].items()}
    for name, expected in files.items():
        file = directory / name
        actual = _sha256_of(file) if store_of(file).size_of(file) is not None else "no such file"
        if actual != expected:
            raise CheckpointFormatError(
                "checksum",
                f"checking {file} against {SHA256_FNAME}: expected SHA-256 {expected}, found {actual}; the checkpoint "
                "is damaged, use another one",
            )


def _entry(values: list[object]) -> SummedFile:
    kind, num_bytes, crc = values
    if kind not in (_DATA, _WHOLE) or type(num_bytes) is not int or type(crc) is not int:
        raise ValueError(f"entry {values!r}")
    return SummedFile(str(kind), num_bytes, crc)


def plain_name(name: Any) -> str:
    """The name of a file that lies beside the one that names it; ValueError for any other."""
    if not isinstance(name, str) or not name or name in (".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(f"file name {name!r}")
    return name


def _inner_name(name: str) -> str:
    return "/".join(map(plain_name, name.split("/")))


def _sizes(directory: Location) -> dict[str, int]:
    """Length of every file of the directory, by name."""
    found = store_of(directory).entries(directory)
    return {entry.name: entry.num_bytes for entry in found if entry.num_bytes is not None}


def _pieces(path: Location) -> Iterator[memoryview]:
    """The content of a file in order; each piece is valid until the next."""
    with store_of(path).open_ranged(path) as file:
        buffer = memoryview(bytearray(min(_READ_BYTES, file.num_bytes)))
        for start in range(0, file.num_bytes, _READ_BYTES):
            yield buffer[: file.read_into(start, buffer)]


def _look_through(path: Location) -> SummedFile:
    """Length and checksum of all of a file, which is opened once."""
    num_bytes = crc = 0
    for content in _pieces(path):
        crc = crc32(content, crc)
        num_bytes += len(content)
    return SummedFile(_WHOLE, num_bytes, crc)


def _sha256_of(path: Location) -> str:
    digest = hashlib.sha256()
    for content in _pieces(path):
        digest.update(content)
    return digest.hexdigest()


def read_trailer_bytes(path: Location) -> bytes:
    """The trailer of a data file as it stands there; `CheckpointFormatError` when there is none."""
    with store_of(path).open_ranged(path) as file:
        size = file.num_bytes
        end = _read(file, max(0, size - _END_BYTES), min(size, _END_BYTES))
        if len(end) < _END_BYTES or not end.startswith(_MAGIC):
            raise _no_trailer(path, f"{size} bytes that do not end in one")
        _, block_bytes, data_bytes, _ = _FOOTER.unpack_from(end)
        table_bytes = -(-data_bytes // block_bytes) * 4 if block_bytes else -1
        if data_bytes + table_bytes + _END_BYTES != size:
            raise _no_trailer(path, f"{size} bytes, with a footer of {data_bytes} bytes in blocks of {block_bytes}")
        return _read(file, data_bytes, table_bytes) + end


def _read(file: RangedFile, start: int, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    return bytes(content[: file.read_into(start, memoryview(content))])


def decode_trailer(content: bytes) -> Trailer:
    """The trailer in bytes that `read_trailer_bytes` returned and a checksum has confirmed."""
    _, block_bytes, data_bytes, _ = _FOOTER.unpack_from(content, len(content) - _END_BYTES)
    crcs = array("I")
    crcs.frombytes(content[: len(content) - _END_BYTES])
    return Trailer(block_bytes, data_bytes, crcs)


def _no_trailer(path: Location, found: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        "truncated",
        f"reading the checksums of data file {path}: expected them at its end, found {found}; the file is truncated or "
        "damaged, use another checkpoint",
    )
