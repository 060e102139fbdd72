"""Compaction of an incremental image: a full image, from the pages of all that it builds upon."""

from __future__ import annotations

import array
from pathlib import Path

from remesh.carried.images.form import format as image_format
from remesh.carried.images.form.carried import copy_carried
from remesh.carried.images.form.format import ChunksState, PagesState
from remesh.carried.images.form.image_reader import StoredImage, read_tree, source_runs, stored_pages
from remesh.carried.images.form.image_writer import Completed, ImageFolder, ImageOrigin
from remesh.carried.images.form.locks import LocksState
from remesh.carried.images.form.pages import PageWriter, place_runs
from remesh.foundation.linux.calls import PAGE_BYTES


def compact_image(source: Path, target: Path, *, compress: bool = False) -> int:
    """Write the image ``source`` to the new folder ``target`` as a full one, which needs no other; returns its bytes.

    Every page is checked on the way. Raises `FormatError` when an image is damaged, `StorageError` when the folder
    exists. Nothing is left behind when it fails.
    """
    tree = read_tree(source)
    with ImageFolder(target) as folder:
        folder.put(image_format.TREE_FILE, tree.state)
        if tree.locks:
            folder.put(image_format.LOCKS_FILE, LocksState(tree.locks))
        if tree.state.carried:
            folder.put_blocks(image_format.CARRIED_FILE, copy_carried(source, tree.state.carried))
        if tree.root.channel is not None:
            folder.put(image_format.CHANNEL_FILE, tree.root.channel)
        written: dict[int, Completed] = {}
        for member in tree.members[1:]:
            with ImageFolder(target / str(member.header.pid)) as own_folder:
                written[member.header.pid] = _compact_member(member, own_folder, {}, compress=compress)
        digests = {pid: each.sha256 for pid, each in written.items()}
        root = _compact_member(tree.root, folder, digests, compress=compress)
        return root.num_bytes + sum(each.num_bytes for each in written.values())


def _compact_member(image: StoredImage, folder: ImageFolder, members: dict[int, str], *, compress: bool) -> Completed:
    folder.put(image_format.PROCESS_FILE, image.process)
    folder.put(image_format.THREADS_FILE, image.threads)
    folder.put(image_format.AREAS_FILE, image.areas)
    folder.put(image_format.FILES_FILE, image.files)
    chunks = _gather(image, folder, compress=compress)
    return folder.complete(ImageOrigin(image.header.pid, compress, (), image.header.machine, members), chunks)


def _gather(image: StoredImage, folder: ImageFolder, *, compress: bool) -> ChunksState:
    folders = image.source_folders()
    own = array.array("Q")

    def put(address: int, data: memoryview) -> None:
        own.extend((address, len(data) // PAGE_BYTES))
        writer.copy(data)

    with PageWriter(folder.path / image_format.PAGES_FILE, compress=compress) as writer:
        for source, runs in sorted(source_runs(image).items()):
            place_runs(runs, stored_pages(folders[source]), put)
        chunks = writer.finish()
    folder.put(image_format.PAGES_INDEX_FILE, PagesState(own.tobytes(), b""))
    return chunks
