"""How is a process written to a folder? It is frozen, its kernel state and pages are read, it goes on or is killed.

inspect   refusals, before anything is stopped; hashes of mapped files
freeze    every thread stands still
state     refusals again, now of what cannot change any more; kernel state
pages     memory to ``pages.bin``; files that were not hashed before are
commit    the header, flushed to the disk
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from remesh.errors import PeerError, StorageError
from remesh.transparent.images import format as image_format
from remesh.transparent.images import track as track_pages
from remesh.transparent.images.capture import capture_areas, capture_files, capture_process, capture_threads
from remesh.transparent.images.format import Ancestor, PagesState
from remesh.transparent.images.frozen import Frozen, freeze
from remesh.transparent.images.identity import Identities
from remesh.transparent.images.increment import Split, number_sources, split_pages
from remesh.transparent.images.inspection import check_imageable
from remesh.transparent.images.kinds import ARENA_PATH, CHANNEL_PATH, ImageReport, NotImageable
from remesh.transparent.images.linux import PAGE_BYTES
from remesh.transparent.images.machine import this_machine
from remesh.transparent.images.memory import can_scan, file_ranges, saved_ranges, saved_ranges_page_by_page
from remesh.transparent.images.pages import PageWriter, ProcessMemory
from remesh.transparent.images.proc_text import Area, AreaKind
from remesh.transparent.images.procfs import inner_id, read_areas, seen_from_here
from remesh.transparent.images.ranges import PageRange
from remesh.transparent.images.store import Contents, complete_image, make_folder
from remesh.transparent.images.stored import digest_of, read_page_index

_IDENTITIES: Final = Identities()
"""Hashes of the files that processes have mapped, kept for the next image."""
_MAX_ANCESTORS: Final = 15
"""An image that would need more earlier ones is a full one, after which those can be removed."""


@dataclass(slots=True)
class _Phases:
    """Seconds by phase, in the order in which they ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def dump_image(
    process: int | Frozen,
    directory: Path,
    *,
    previous: Path | None = None,
    compress: bool = False,
    track: bool = False,
) -> ImageReport:
    """Write the image of a process into a new folder, readable by its owner only, flushed to the disk.

    ``process`` is a process id (frozen for the time of the dump, then it goes on) or a process that is frozen already
    (and stays so: the way to stop is to dump, commit, and `Upper.kill` it before thawing). With ``track`` the kernel
    notes which pages change from now on, so that a later image may name this one as ``previous`` and hold only those;
    the earlier one must then be kept, beside the later one. Includes the bytes of its channel.

    Raises `NotImageable` when the process has something an image cannot hold (nothing is written then), `StorageError`
    when the disk is full or the folder exists; the process goes on in both cases.
    """
    phases = _Phases()
    pid = process.pid if isinstance(process, Frozen) else process
    order = _Order(directory, previous, compress, track)
    if isinstance(process, Frozen):
        process.check_owner()
        return _dump_frozen(process, order, phases)
    with phases.phase("inspect"):
        _refuse_unless_imageable(pid)
        _hash_files(pid)
    with phases.phase("freeze"):
        frozen = freeze(pid)
    with frozen:
        return _dump_frozen(frozen, order, phases)


@dataclass(frozen=True, slots=True)
class _Order:
    """What to write, and where; see `dump_image`."""

    directory: Path
    previous: Path | None
    compress: bool
    track: bool


def _refuse_unless_imageable(pid: int) -> None:
    refusals = check_imageable(pid)
    if refusals:
        raise NotImageable(f"dumping process {pid}", refusals)


def _hash_files(pid: int) -> None:
    """Most files stay as they are until the process stands still: hashing them now keeps that time short."""
    with contextlib.suppress(OSError, PeerError):
        _capture_names(pid)


def _dump_frozen(frozen: Frozen, order: _Order, phases: _Phases) -> ImageReport:
    _refuse_unless_imageable(frozen.pid)
    make_folder(order.directory)
    try:
        areas = read_areas(frozen.pid)
        with phases.phase("state"):
            records = _capture_kernel_state(frozen)
        with phases.phase("pages"):
            split, ancestors = _split_pages(frozen.pid, order, areas)
            pages = _write_pages(frozen, order, split, records)
            records[image_format.PAGES_INDEX_FILE] = pages
        with phases.phase("commit"):
            num_bytes = complete_image(order.directory, _contents(frozen, order, records, ancestors))
        why_not = ""
        if order.track:
            with phases.phase("track"):
                why_not = track_pages.set_marks(frozen, digest_of(order.directory), areas)
    except BaseException as error:
        shutil.rmtree(order.directory, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise StorageError(
                f"dumping process {frozen.pid} to {order.directory}: {error.strerror}; the image was removed and the "
                "process goes on; make room and take another"
            ) from error
        raise
    own = sum(item.num_bytes for item in split.own) // PAGE_BYTES
    inherited = sum(run.num_pages for run in split.inherited)
    needed = tuple(os.path.normpath(order.directory.absolute() / ancestor.folder) for ancestor in ancestors)
    return ImageReport(num_bytes, own, inherited, needed, phases.seconds, why_not)


def _capture_kernel_state(frozen: Frozen) -> dict[str, Any]:
    """What the process and its threads are, by file name."""
    scratch = frozen.prepare_calls()
    try:
        process = capture_process(frozen, scratch)
        threads = capture_threads(frozen, scratch)
    finally:
        frozen.finish_calls()
    return {
        image_format.PROCESS_FILE: process,
        image_format.THREADS_FILE: image_format.ThreadsState(tuple(threads)),
    }


def _capture_names(pid: int) -> dict[str, Any]:
    """What the process has mapped and open, by file name."""
    return {
        image_format.AREAS_FILE: capture_areas(pid, _IDENTITIES),
        image_format.FILES_FILE: capture_files(pid, _IDENTITIES),
    }


def _saved_pages(pid: int, areas: list[Area]) -> list[PageRange]:
    """The pages that the image holds, itself or by an earlier one."""
    ranges_of = saved_ranges if can_scan(pid) else saved_ranges_page_by_page
    return [
        pages
        for area in areas
        for pages in (file_ranges(pid, area) if area.path == ARENA_PATH else ranges_of(pid, area))
    ]


def _write_pages(frozen: Frozen, order: _Order, split: Split, records: dict[str, Any]) -> PagesState:
    """Write the image's own pages; the index of all. Meanwhile files are hashed, and their records completed."""
    memory = ProcessMemory(frozen.pid, frozen.leader.memory_descriptor())
    with ThreadPoolExecutor(1, "remesh-hash") as pool:
        names = pool.submit(_capture_names, frozen.pid)
        with PageWriter(order.directory / image_format.PAGES_FILE, compress=order.compress) as writer:
            writer.save(memory, split.own)
        records.update(names.result())
    return PagesState.of(writer.chunks(), [*writer.runs(), *split.inherited])


def _split_pages(pid: int, order: _Order, areas: list[Area]) -> tuple[Split, list[Ancestor]]:
    """All pages are the image's own, unless marks have been kept since the previous image and the chain is short.

    The pages of earlier images are numbered by the ancestors that are returned.
    """
    saved = _saved_pages(pid, areas)
    if order.previous is None or not track_pages.is_tracked_since(pid, digest_of(order.previous)):
        return Split(saved, []), []
    header, index = read_page_index(order.previous)
    if len(header.builds_upon) + 1 > _MAX_ANCESTORS:
        return Split(saved, []), []
    folders = [order.previous, *(order.previous / ancestor.folder for ancestor in header.builds_upon)]
    digests = [digest_of(order.previous), *(ancestor.sha256 for ancestor in header.builds_upon)]
    ancestors = [
        Ancestor(os.path.relpath(folder, order.directory), sha256)
        for folder, sha256 in zip(folders, digests, strict=True)
    ]
    written: list[PageRange] = []
    for area in areas:
        found = track_pages.written_since(pid, area) if area.kind is AreaKind.ANONYMOUS else None
        written += [PageRange(area.start, area.end)] if found is None else found
    split = split_pages(saved, written, index.page_runs())
    inherited, ancestors = number_sources(split.inherited, ancestors)
    return Split(split.own, inherited), ancestors


def _contents(frozen: Frozen, order: _Order, records: dict[str, Any], ancestors: list[Ancestor]) -> Contents:
    channel = None
    if any(area.path == CHANNEL_PATH and area.kind is AreaKind.SHARED_FILE for area in read_areas(frozen.pid)):
        channel = Path(seen_from_here(frozen.pid, CHANNEL_PATH)).read_bytes()
    return Contents(
        pid=inner_id(frozen.pid, frozen.pid),
        compressed=order.compress,
        builds_upon=tuple(ancestors),
        machine=this_machine(len(frozen.leader.xstate())),
        records=records,
        channel=channel,
    )
