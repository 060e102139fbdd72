"""Reader of a stored image: every file is checked against the header before a byte of it is used.

`read_tree` reads everything but the pages, whose chunks carry their own checksums; `read_image` that of one process.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from remesh.carried.images.form import format as image_format
from remesh.carried.images.form.format import (
    AreasState,
    ChunksState,
    FilesState,
    Header,
    PagesState,
    ProcessState,
    StoredFile,
    ThreadsState,
)
from remesh.carried.images.form.identity import hash_all
from remesh.carried.images.form.layers import PageRun, visible_runs
from remesh.carried.images.form.locks import FileLock, LocksState
from remesh.carried.images.form.pages import check_chunks, read_chunks
from remesh.carried.images.form.records import from_json, to_json
from remesh.carried.images.form.tree_format import TreeState
from remesh.foundation.errors import FormatError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredImage:
    """The image of one process, but for its pages."""

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


@dataclass(frozen=True, slots=True)
class StoredTree:
    """The images of a process and its descendants, but for their pages."""

    state: TreeState
    members: tuple[StoredImage, ...]  # of those that live, in the order of the tree: the root first
    locks: tuple[FileLock, ...]  # of files

    @property
    def root(self) -> StoredImage:
        return self.members[0]


def read_tree(folder: Path) -> StoredTree:
    """Read and check all of an image but its pages. Raises `FormatError` that names a file that is not as written."""
    root = read_image(folder)
    name = image_format.TREE_FILE
    if name not in root.header.files:
        raise FormatError(
            "bad-record",
            f"reading {folder}: it is the image of a child process; restart from the image that contains it",
        )
    state = _read_record(folder, root.header, name, TreeState)
    _check_carried(folder, root.header, state)
    living = [each.pid for each in state.living]
    if living[0] != root.header.pid or set(living[1:]) != set(root.header.members):
        raise _bad_tree(folder, f"its processes {living} are not those of the header, {sorted(root.header.members)}")
    members = [root]
    for pid in living[1:]:
        members.append(read_image(folder / str(pid)))
        if members[-1].header.pid != pid or digest_of(folder / str(pid)) != root.header.members[pid]:
            raise FormatError(
                "bad-checksum",
                f"reading {folder / str(pid) / image_format.HEADER_FILE}: it is not the one that {folder} names; "
                "restart from another image",
            )
    tids = [thread.tid for member in members for thread in member.threads.threads]
    if len(set(tids)) != len(tids):
        raise _bad_tree(folder, "two threads have the same id")
    for member in members:
        _check_targets(member, state)
    return StoredTree(state, tuple(members), _read_locks(folder, root.header, state))


def _read_locks(folder: Path, header: Header, state: TreeState) -> tuple[FileLock, ...]:
    if image_format.LOCKS_FILE not in header.files:
        return ()
    locks = _read_record(folder, header, image_format.LOCKS_FILE, LocksState).locks
    for lock in locks:
        if lock.file not in range(len(state.files)):
            raise _bad_tree(folder, f"a lock is of file {lock.file}")
    return locks


def _check_targets(member: StoredImage, state: TreeState) -> None:
    """Check that all objects to which a process refers are in the tree."""
    for descriptor in member.files.descriptors:
        if descriptor.file not in range(len(state.files)):
            raise _bad_tree(member.folder, f"descriptor {descriptor.number} leads to file {descriptor.file}")
    for area in member.areas.areas:
        if area.carried is not None and area.carried not in range(len(state.carried)):
            raise _bad_tree(member.folder, f"the area at {area.start:#x} is of the carried file {area.carried}")


def _bad_tree(folder: Path, why: str) -> FormatError:
    return FormatError("bad-record", f"reading {folder / image_format.TREE_FILE}: {why}; restart from another image")


def read_header(folder: Path) -> Header:
    """The header of an image. Raises `FormatError` when there is none or it is damaged."""
    path = folder / image_format.HEADER_FILE
    sealed = _parse(_read_bounded(path), path)
    seal = from_json(image_format.Seal, sealed, str(path))
    if hashlib.sha256(seal.header.encode()).hexdigest() != seal.sha256:
        raise FormatError("bad-checksum", f"reading {path}: its SHA-256 does not match; restart from another image")
    return from_json(Header, _parse(seal.header.encode(), path), str(path))


def read_image(folder: Path) -> StoredImage:
    """Read and check the image of one process but for its pages. Raises `FormatError` that names a wrong file."""
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
    channel = None
    if image_format.CHANNEL_FILE in header.files:
        channel = _read_checked(folder, header, image_format.CHANNEL_FILE)
    check_chunks(folder / image_format.PAGES_FILE, chunks)
    runs = _runs_of(folder, header, areas, pages)
    image = StoredImage(folder, header, process, threads, areas, files, pages, chunks, runs, channel)
    _check_ancestors(image)
    return image


def read_tree_areas(folder: Path) -> list[AreasState]:
    """The memory maps of all processes of an image, checked."""
    members = [folder / str(pid) for pid in read_header(folder).members]
    return [_read_record(each, read_header(each), image_format.AREAS_FILE, AreasState) for each in (folder, *members)]


def stored_pages(folder: Path) -> Iterator[tuple[int, memoryview]]:
    """The pages that an image holds itself, as `read_chunks` gives them."""
    header = read_header(folder)
    chunks = _read_record(folder, header, image_format.CHUNKS_FILE, ChunksState)
    return read_chunks(folder / image_format.PAGES_FILE, chunks, header.compressed)


def describe_image(folder: Path) -> dict[str, Any]:
    """An image as JSON, without the content of its pages: what ``remesh mpi show`` prints.

    Of a tree that is its root, ``tree``, and its descendants by id under ``members``.
    """
    tree = read_tree(folder)
    members = {str(member.header.pid): _described(member) for member in tree.members[1:]}
    return {**_described(tree.root), "tree": to_json(tree.state), "locks": to_json(tree.locks), "members": members}


def _described(image: StoredImage) -> dict[str, Any]:
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


def _check_carried(folder: Path, header: Header, tree: TreeState) -> None:
    """Check the bytes of carried files, which may be many: they are summed, not kept."""
    if not tree.carried:
        return
    path, stored = folder / image_format.CARRIED_FILE, header.files.get(image_format.CARRIED_FILE)
    num_bytes = sum(file.num_stored_bytes for file in tree.carried)
    try:
        found = StoredFile(os.stat(path).st_size, hash_all(str(path), num_bytes))
    except OSError as error:
        raise FormatError(
            "missing-file", f"reading {path}: {error.strerror}; the image is incomplete, restart from another one"
        ) from error
    if found != stored or found.num_bytes != num_bytes:
        raise FormatError(
            "bad-checksum",
            f"reading {path}: it has not the {num_bytes} bytes of tree.json and the SHA-256 of the header; "
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
                f"reading {image.folder}: it is an increment of {folder}, which has changed since; "
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
