"""How is an image read back and trusted? Every file is checked against the header before a byte of it is used.

`read_image` reads everything but the pages, whose chunks carry their own checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from remesh.errors import FormatError
from remesh.images import format as image_format
from remesh.images.format import (
    AreasState,
    ChunksState,
    FilesState,
    Header,
    PagesState,
    ProcessState,
    StoredFile,
    ThreadsState,
)
from remesh.images.identity import hash_of
from remesh.images.layers import PageRun, visible_runs
from remesh.images.pages import check_chunks, read_chunks
from remesh.images.records import from_json, to_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image, but for its pages."""

    folder: Path
    header: Header
    process: ProcessState
    threads: ThreadsState
    areas: AreasState
    files: FilesState
    pages: PagesState
    chunks: ChunksState
    runs: tuple[PageRun, ...]  # of all its pages, each once, by address
    channel: bytes | None  # the bytes of the file behind its channel

    def source_folders(self) -> list[Path]:
        """The folders that runs of pages name by their source: this one, then what it builds upon."""
        return [self.folder, *(self.folder / ancestor.folder for ancestor in self.header.builds_upon)]


def read_header(folder: Path) -> Header:
    """The header of an image. Raises `FormatError` when there is none or it is damaged."""
    path = folder / image_format.HEADER_FILE
    sealed = _parse(_read_bounded(path), path)
    seal = from_json(image_format.Seal, sealed, str(path))
    if hashlib.sha256(seal.header.encode()).hexdigest() != seal.sha256:
        raise FormatError("bad-checksum", f"reading {path}: its SHA-256 does not fit; restart from another image")
    return from_json(Header, _parse(seal.header.encode(), path), str(path))


def read_image(folder: Path) -> StoredImage:
    """Everything but the pages, checked. Raises `FormatError` that names the file when one is not as written."""
    header = read_header(folder)
    kinds: dict[str, Any] = {
        image_format.PROCESS_FILE: ProcessState,
        image_format.THREADS_FILE: ThreadsState,
        image_format.AREAS_FILE: AreasState,
        image_format.FILES_FILE: FilesState,
        image_format.PAGES_INDEX_FILE: PagesState,
        image_format.CHUNKS_FILE: ChunksState,
    }
    process, threads, areas, files, pages, chunks = (
        _read_record(folder, header, name, kind) for name, kind in kinds.items()
    )
    _check_nameless(folder, header, files)
    channel = None
    if image_format.CHANNEL_FILE in header.files:
        channel = _read_checked(folder, header, image_format.CHANNEL_FILE)
    check_chunks(folder / image_format.PAGES_FILE, chunks)
    runs = _runs_of(folder, header, areas, pages)
    image = StoredImage(folder, header, process, threads, areas, files, pages, chunks, runs, channel)
    _check_ancestors(image)
    return image


def stored_pages(folder: Path) -> Iterator[tuple[int, memoryview]]:
    """The pages that an image holds itself, as `read_chunks` gives them."""
    header = read_header(folder)
    chunks = _read_record(folder, header, image_format.CHUNKS_FILE, ChunksState)
    return read_chunks(folder / image_format.PAGES_FILE, chunks, header.compressed)


def describe_image(folder: Path) -> dict[str, Any]:
    """An image as JSON, without the content of its pages: what ``remesh mpi show`` prints."""
    image = read_image(folder)
    names = ("header", "process", "threads", "areas", "files", "runs", "chunks")
    return {name: to_json(getattr(image, name)) for name in names}


def digest_of(folder: Path) -> str:
    """SHA-256 of the header, which stands for the whole image."""
    return hashlib.sha256(_read_bounded(folder / image_format.HEADER_FILE)).hexdigest()


def _read_bounded(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > image_format.MAX_JSON_BYTES:
                raise FormatError(
                    "too-large", f"reading {path}: {size} bytes, expected at most 1 GiB; take another image"
                )
            return file.read()
    except OSError as error:
        raise FormatError(
            "missing-file", f"reading {path}: {error.strerror}; the image is incomplete, restart from another one"
        ) from error


def _read_checked(folder: Path, header: Header, name: str) -> bytes:
    content, stored = _read_bounded(folder / name), header.files[name]
    if len(content) != stored.num_bytes or hashlib.sha256(content).hexdigest() != stored.sha256:
        raise FormatError(
            "bad-checksum",
            f"reading {folder / name}: it has not the {stored.num_bytes} bytes and the SHA-256 of the header; "
            "restart from another image",
        )
    return content


def _check_nameless(folder: Path, header: Header, files: FilesState) -> None:
    """The bytes of files without a name may be many: they are summed, not kept."""
    if not files.nameless:
        return
    path, stored = folder / image_format.NAMELESS_FILE, header.files.get(image_format.NAMELESS_FILE)
    num_bytes = sum(file.num_stored_bytes for file in files.nameless)
    try:
        found = StoredFile(os.stat(path).st_size, hash_of(str(path), num_bytes))
    except OSError as error:
        raise FormatError(
            "missing-file", f"reading {path}: {error.strerror}; the image is incomplete, restart from another one"
        ) from error
    if found != stored or found.num_bytes != num_bytes:
        raise FormatError(
            "bad-checksum",
            f"reading {path}: it has not the {num_bytes} bytes of files.json and the SHA-256 of the header; "
            "restart from another image",
        )


def _parse(content: bytes, where: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FormatError("bad-json", f"reading {where}: {error}; restart from another image") from error


def _read_record(folder: Path, header: Header, name: str, kind: type[T]) -> T:
    return from_json(kind, _parse(_read_checked(folder, header, name), folder / name), name)


def _check_ancestors(image: StoredImage) -> None:
    for ancestor in image.header.builds_upon:
        folder = image.folder / ancestor.folder
        if digest_of(folder) != ancestor.sha256:
            raise FormatError(
                "other-ancestor",
                f"reading {image.folder}: it builds upon {folder}, which is not the image it was then; "
                "restart from another image",
            )


def _runs_of(folder: Path, header: Header, areas: AreasState, pages: PagesState) -> tuple[PageRun, ...]:
    """The runs of pages, each within one area."""
    try:
        runs = visible_runs(pages.layers(len(header.builds_upon)))
    except ValueError as error:
        raise _bad_index(folder, str(error)) from error
    at = iter(areas.areas)
    area = next(at, None)
    for run in runs:
        while area is not None and area.end <= run.start:
            area = next(at, None)
        if area is None or run.start < area.start or area.end < run.end:
            raise _bad_index(folder, f"the pages at {run.start:#x} lie outside of the memory map")
    return tuple(runs)


def _bad_index(folder: Path, why: str) -> FormatError:
    where = folder / image_format.PAGES_INDEX_FILE
    return FormatError("bad-record", f"reading {where}: {why}; restart from another image")


def source_runs(image: StoredImage) -> dict[int, list[PageRun]]:
    """The runs of pages by source."""
    by_source: dict[int, list[PageRun]] = {}
    for run in image.runs:
        by_source.setdefault(run.source, []).append(run)
    return by_source
