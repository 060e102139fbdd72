"""Dump of one frozen process of a tree: its kernel state and pages.

scan      which pages the image holds itself
state     while they are written: which others can be seen; kernel state, descriptors
pages     the rest of memory to ``pages.bin``
track     all pages have been read: from now on the kernel notes which of them change
commit    once the mapped files have been hashed: the memory map with them, and the header; flushed to the disk
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from remesh.carried.images.form import format as image_format
from remesh.carried.images.form.format import Ancestor, ChunksState, Header, index_pages
from remesh.carried.images.form.identity import IDENTITIES
from remesh.carried.images.form.image_reader import digest_of
from remesh.carried.images.form.image_writer import Completed, ImageFolder
from remesh.carried.images.form.increment import drop_hidden, split_pages
from remesh.carried.images.form.kinds import ARENA_PATH
from remesh.carried.images.form.layers import Layer, own_layer
from remesh.carried.images.form.pages import PageWriter, ProcessMemory
from remesh.carried.images.form.processor_state import this_machine
from remesh.carried.images.form.ranges import PageSet
from remesh.carried.images.look import track as track_pages
from remesh.carried.images.look.capture import capture_area, capture_process, capture_threads, mapped_files
from remesh.carried.images.look.descriptor_survey import Survey
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.pagemap import PageMap, file_pages, private_spans
from remesh.foundation.linux.calls import PAGE_BYTES

_MAX_ANCESTORS: Final = 15
"""Limit of earlier images: one that would need more is a full one, after which those can be removed."""


@dataclass(slots=True)
class Phases:
    """The seconds of each phase, in the order in which they ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass(frozen=True, slots=True)
class ImageOrder:
    """The arguments of `dump_image`: what to write, and where."""

    directory: Path
    previous: Path | None
    compress: bool
    track: bool

    def of_member(self, inner_pid: int) -> ImageOrder:
        """The order for a descendant; if it was not there at the previous image, it is written in full."""
        previous = None if self.previous is None else self.previous / str(inner_pid)
        previous = previous if previous is not None and previous.is_dir() else None
        return ImageOrder(self.directory / str(inner_pid), previous, self.compress, self.track)


@dataclass(frozen=True, slots=True)
class WrittenMember:
    """The result of writing one process."""

    completed: Completed
    num_pages: int
    num_pages_inherited: int
    ancestors: tuple[Path, ...]  # folders of the images that it needs, absolute
    not_tracked: str  # see `ImageReport`


@dataclass(frozen=True, slots=True)
class SavedMember:
    """A process of which all is written but what the hashes of its mapped files belong to."""

    process: FrozenProcess
    order: ImageOrder
    folder: ImageFolder
    num_bytes: int  # of all pages, own and inherited
    layers: tuple[Layer, ...]  # that of own pages, then those of each ancestor
    ancestors: tuple[Ancestor, ...]
    chunks: ChunksState
    not_tracked: str  # see `ImageReport`

    def complete(self, survey: Survey, phases: Phases, members: dict[int, str]) -> WrittenMember:
        """Make it an image; ``members`` of a root: see `Header`."""
        process = self.process
        with phases.phase("commit"):
            files = mapped_files(process.pid, process.areas, IDENTITIES, survey.written)
            areas = tuple(capture_area(area, survey.number_of_carried) for area in process.areas)
            self.folder.put(image_format.AREAS_FILE, image_format.AreasState(areas, files))
            machine = this_machine(len(process.leader.xstate()))
            rest = (process.inner_pid, self.order.compress, self.ancestors, machine)
            written = self.folder.complete(
                self.chunks, lambda files: Header(image_format.VERSION, *rest, files, members)
            )
        if self.order.track and not self.not_tracked:
            track_pages.keep_basis(process.pid, track_pages.Basis(written.sha256, self.layers, self.ancestors))
        num_own = self.chunks.num_raw_bytes // PAGE_BYTES
        num_inherited = self.num_bytes // PAGE_BYTES - num_own
        needed = (Path(os.path.normpath(self.order.directory.absolute() / each.folder)) for each in self.ancestors)
        return WrittenMember(written, num_own, num_inherited, tuple(needed), self.not_tracked)


def save_member(
    process: FrozenProcess, order: ImageOrder, survey: Survey, phases: Phases, folder: ImageFolder
) -> SavedMember:
    """Write all but the header of a process into its folder, which may hold files of the tree already.

    Pages of private memory that were written since they were marked are the image's own, whatever else is found; so is
    all of it in a full image, and where there are no marks. So those are written first: to find them costs what was
    written. Meanwhile all private pages that are there are found, which decide what of older images can be seen, and
    state is written that the pages do not need.
    """
    with (
        PageWriter(order.directory / image_format.PAGES_FILE, compress=order.compress) as writer,
        PageMap(process.pid) as pages,
    ):
        memory = ProcessMemory(process.pid, process.leader.memory_descriptor())
        with phases.phase("scan"):
            basis = _find_basis(process.pid, order)
            spans = private_spans(process.areas)
            first = PageSet.chain(map(pages.saved if basis is None else pages.written, spans))
        writer.save(memory, first)
        with phases.phase("state"):
            saved = first if basis is None else PageSet.chain(map(pages.saved, spans))
            of_arena = PageSet.chain(file_pages(process.pid, area) for area in process.areas if area.path == ARENA_PATH)
            split = split_pages(first, saved, () if basis is None else basis.layers).and_own(of_arena)
            split, ancestors = drop_hidden(split, [] if basis is None else _ancestors(order, basis))
            for more in split.own[1:]:
                writer.save(memory, more)
            _put_state(process, survey, folder)
            folder.put(image_format.PAGES_INDEX_FILE, index_pages(split.own, split.inherited))
            layers = (own_layer(*split.own), *split.inherited)
        with phases.phase("pages"):
            writer.wait_until_read()
        with phases.phase("track"):
            not_tracked = track_pages.set_marks(process, first) if order.track else ""
        with phases.phase("pages"):
            chunks = writer.finish()
    return SavedMember(process, order, folder, split.num_bytes, layers, tuple(ancestors), chunks, not_tracked)


def _put_state(process: FrozenProcess, survey: Survey, folder: ImageFolder) -> None:
    """Write all but the pages, and the memory map with its files."""
    scratch = process.prepare_calls()
    try:
        folder.put(image_format.PROCESS_FILE, capture_process(process, scratch, survey.seat))
        threads = tuple(capture_threads(process, scratch))
        folder.put(image_format.THREADS_FILE, image_format.ThreadsState(threads))
    finally:
        process.finish_calls()
    folder.put(image_format.FILES_FILE, survey.descriptors[process.pid])


def _find_basis(pid: int, order: ImageOrder) -> track_pages.Basis | None:
    """Find the basis of an increment: marks have been kept since the previous image, and the chain is short."""
    basis = None if order.previous is None else track_pages.basis_of(pid, digest_of(order.previous))
    return None if basis is None or len(basis.builds_upon) + 1 > _MAX_ANCESTORS else basis


def _ancestors(order: ImageOrder, basis: track_pages.Basis) -> list[Ancestor]:
    """The previous image and what it builds upon, as seen from the new one."""
    assert order.previous is not None
    folders = [order.previous, *(order.previous / ancestor.folder for ancestor in basis.builds_upon)]
    digests = [basis.sha256, *(ancestor.sha256 for ancestor in basis.builds_upon)]
    return [
        Ancestor(os.path.relpath(folder, order.directory), sha256)
        for folder, sha256 in zip(folders, digests, strict=True)
    ]
