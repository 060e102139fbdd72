"""How is a process written to a folder? It is frozen, its kernel state and pages are read, it goes on or is killed.

inspect   refusals, before anything is stopped; hashes of mapped files
freeze    every thread stands still
scan      which pages the image holds itself
state     while they are written: which others can be seen; refusals again, now of what cannot change any more; kernel
          state, names of files
pages     the rest of memory to ``pages.bin``
track     all pages have been read: from now on the kernel notes which of them change
commit    the header, flushed to the disk
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from remesh.collector import collector_at_rest
from remesh.errors import PeerError, StorageError
from remesh.images import format as image_format
from remesh.images import track as track_pages
from remesh.images.capture import capture_areas, capture_files, capture_process, capture_threads
from remesh.images.format import Ancestor, ChunksState, index_pages
from remesh.images.frozen import Frozen, freeze
from remesh.images.identity import Identities
from remesh.images.increment import drop_hidden
from remesh.images.inspection import check_imageable
from remesh.images.kinds import CHANNEL_PATH, ImageReport, NotImageable
from remesh.images.layers import Layer, own_layer
from remesh.images.machine import this_machine
from remesh.images.nameless import read_nameless
from remesh.images.pagemap import PageMap
from remesh.images.pages import PageWriter, ProcessMemory
from remesh.images.scan import Scan
from remesh.images.store import ImageFolder, ImageOrigin
from remesh.images.stored import digest_of
from remesh.images.turns import short_turns
from remesh.linux.calls import PAGE_BYTES
from remesh.linux.proc_text import Area, AreaKind
from remesh.linux.procfs import inner_id, read_areas, seen_from_here

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

    Raises `NotImageable` when the process has something an image cannot hold (nothing is left then), `StorageError`
    when the disk is full or the folder exists; the process goes on in both cases.
    """
    phases = _Phases()
    pid = process.pid if isinstance(process, Frozen) else process
    order = _ImageOrder(directory, previous, compress, track)
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
class _ImageOrder:
    """What to write, and where; see `dump_image`."""

    directory: Path
    previous: Path | None
    compress: bool
    track: bool


def _refuse_unless_imageable(pid: int, areas: list[Area] | None = None) -> None:
    refusals = check_imageable(pid, areas)
    if refusals:
        raise NotImageable(f"dumping process {pid}", refusals)


def _hash_files(pid: int) -> None:
    """Most files stay as they are until the process stands still: hashing them now keeps that time short."""
    with contextlib.suppress(OSError, PeerError):
        capture_areas(pid, read_areas(pid), _IDENTITIES)
        capture_files(pid, _IDENTITIES)


@collector_at_rest()
@short_turns()
def _dump_frozen(frozen: Frozen, order: _ImageOrder, phases: _Phases) -> ImageReport:
    try:
        with ImageFolder(order.directory) as folder:
            return _fill_folder(frozen, order, phases, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        raise StorageError(
            f"dumping process {frozen.pid} to {order.directory}: {error.strerror}; the image was removed and the "
            "process goes on; make room and take another"
        ) from error


@dataclass(frozen=True, slots=True)
class _SavedPages:
    """What is written once all pages are."""

    num_bytes: int
    """Of all pages, own and inherited."""
    layers: tuple[Layer, ...]
    """The own pages, then those of each ancestor."""
    ancestors: tuple[Ancestor, ...]
    chunks: ChunksState
    not_tracked: str
    """See `ImageReport`."""


def _fill_folder(frozen: Frozen, order: _ImageOrder, phases: _Phases, folder: ImageFolder) -> ImageReport:
    with PageWriter(order.directory / image_format.PAGES_FILE, compress=order.compress) as writer:
        saved = _save(frozen, order, phases, folder, writer)
    with phases.phase("commit"):
        machine = this_machine(len(frozen.leader.xstate()))
        origin = ImageOrigin(inner_id(frozen.pid, frozen.pid), order.compress, saved.ancestors, machine)
        written = folder.complete(origin, saved.chunks)
    if order.track and not saved.not_tracked:
        track_pages.keep_basis(frozen.pid, track_pages.Basis(written.sha256, saved.layers, saved.ancestors))
    num_own = saved.chunks.num_raw_bytes // PAGE_BYTES
    num_inherited = saved.num_bytes // PAGE_BYTES - num_own
    needed = tuple(os.path.normpath(order.directory.absolute() / ancestor.folder) for ancestor in saved.ancestors)
    return ImageReport(written.num_bytes, num_own, num_inherited, needed, phases.seconds, saved.not_tracked)


def _save(frozen: Frozen, order: _ImageOrder, phases: _Phases, folder: ImageFolder, writer: PageWriter) -> _SavedPages:
    """All but the header. What is not needed to begin with the pages is done while they are copied and written."""
    memory = ProcessMemory(frozen.pid, frozen.leader.memory_descriptor())
    with PageMap(frozen.pid) as pages:
        with phases.phase("scan"):
            basis = _find_basis(frozen.pid, order)
            scan = Scan(pages, frozen.areas, None if basis is None else basis.layers)
        writer.save(memory, scan.first)
        with phases.phase("state"):
            split, ancestors = drop_hidden(scan.split(), [] if basis is None else _ancestors(order, basis))
            for more in split.own[1:]:
                writer.save(memory, more)
            _put_state(frozen, folder)
            folder.put(image_format.PAGES_INDEX_FILE, index_pages(split.own, split.inherited))
            layers = (own_layer(*split.own), *split.inherited)
    with phases.phase("pages"):
        writer.wait_until_read()
    with phases.phase("track"):
        not_tracked = track_pages.set_marks(frozen, scan.first) if order.track else ""
    with phases.phase("pages"):
        return _SavedPages(split.num_bytes, layers, tuple(ancestors), writer.finish(), not_tracked)


def _put_state(frozen: Frozen, folder: ImageFolder) -> None:
    """All but the pages; `NotImageable` when there is something that an image cannot hold."""
    _refuse_unless_imageable(frozen.pid, frozen.areas)
    scratch = frozen.prepare_calls()
    try:
        folder.put(image_format.PROCESS_FILE, capture_process(frozen, scratch))
        threads = tuple(capture_threads(frozen, scratch))
        folder.put(image_format.THREADS_FILE, image_format.ThreadsState(threads))
    finally:
        frozen.finish_calls()
    folder.put(image_format.AREAS_FILE, capture_areas(frozen.pid, frozen.areas, _IDENTITIES))
    files = capture_files(frozen.pid, _IDENTITIES)
    folder.put(image_format.FILES_FILE, files)
    if files.nameless:
        folder.put_blocks(image_format.NAMELESS_FILE, read_nameless(frozen.pid, files))
    if any(area.path == CHANNEL_PATH and area.kind is AreaKind.SHARED_FILE for area in frozen.areas):
        channel = Path(seen_from_here(frozen.pid, CHANNEL_PATH)).read_bytes()
        folder.put(image_format.CHANNEL_FILE, _without_zeros_at_end(channel))


def _without_zeros_at_end(data: bytes) -> bytes:
    """Most slots of a channel are of threads that the program does not have. Up to a page of zeros may be left."""
    end = len(data)
    while end and data[max(end - PAGE_BYTES, 0) : end] == bytes(min(end, PAGE_BYTES)):
        end = max(end - PAGE_BYTES, 0)
    return data[:end]


def _find_basis(pid: int, order: _ImageOrder) -> track_pages.Basis | None:
    """What an increment can be made upon: marks have been kept since the previous image, and the chain is short."""
    basis = None if order.previous is None else track_pages.basis_of(pid, digest_of(order.previous))
    return None if basis is None or len(basis.builds_upon) + 1 > _MAX_ANCESTORS else basis


def _ancestors(order: _ImageOrder, basis: track_pages.Basis) -> list[Ancestor]:
    """The previous image and what it builds upon, as seen from the new one."""
    assert order.previous is not None
    folders = [order.previous, *(order.previous / ancestor.folder for ancestor in basis.builds_upon)]
    digests = [basis.sha256, *(ancestor.sha256 for ancestor in basis.builds_upon)]
    return [
        Ancestor(os.path.relpath(folder, order.directory), sha256)
        for folder, sha256 in zip(folders, digests, strict=True)
    ]
