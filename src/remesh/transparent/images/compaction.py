"""How does an increment become an image of its own? Its pages are gathered from the images it builds upon."""

from __future__ import annotations

import shutil
from pathlib import Path

from remesh.transparent.images import format as image_format
from remesh.transparent.images.format import PagesState
from remesh.transparent.images.pages import PageWriter, place_runs, read_chunks
from remesh.transparent.images.store import Contents, complete_image, make_folder
from remesh.transparent.images.stored import StoredImage, read_image, read_page_index, source_runs


def compact_image(source: Path, target: Path, *, compress: bool = False) -> int:
    """Write the image ``source`` to the new folder ``target`` as a full one, which needs no other; its length in bytes.

    Every page is checked on the way. Raises `FormatError` when an image is damaged, `StorageError` when the folder
    exists. Nothing is left behind when it fails.
    """
    image = read_image(source)
    make_folder(target)
    try:
        pages = _gather(image, target, compress=compress)
        records = {
            image_format.PROCESS_FILE: image.process,
            image_format.THREADS_FILE: image.threads,
            image_format.AREAS_FILE: image.areas,
            image_format.FILES_FILE: image.files,
            image_format.PAGES_INDEX_FILE: pages,
        }
        header = image.header
        return complete_image(target, Contents(header.pid, compress, (), header.machine, records, image.channel))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _gather(image: StoredImage, target: Path, *, compress: bool) -> PagesState:
    folders = image.source_folders()
    with PageWriter(target / image_format.PAGES_FILE, compress=compress) as writer:
        for source, runs in sorted(source_runs(image).items()):
            header, pages = read_page_index(folders[source])
            chunks = read_chunks(folders[source] / image_format.PAGES_FILE, pages.chunks, header.compressed)
            place_runs(runs, chunks, writer.copy)
    return PagesState.of(writer.chunks(), writer.runs())
