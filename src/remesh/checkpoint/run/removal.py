"""Removal of tensors from a complete checkpoint, by the prefix of their keys.

The one change that a complete checkpoint allows, because a user asks for it by name. The index without those tensors
replaces the old one in one step; only then files are deleted, and only those that no other tensor or object needs. A
crash leaves the checkpoint as it was or as it shall be, with at most files that nothing refers to, and at worst
without its checksums. Bytes in files that
hold other things as well stay there.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import PurePosixPath

from remesh.checkpoint.formats.directory import is_data_file_name
from remesh.checkpoint.formats.index_files import write_manifest
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import (
    CHECKSUMS_FNAME,
    SHA256_FNAME,
    replace_checksums,
    write_sha256_manifest,
)

logger = logging.getLogger(__name__)


def remove_tensors(directory: Location, key_prefix: str) -> list[str]:
    """Remove every tensor whose key starts with the prefix; returns their keys. Called by one process."""
    manifest = open_checkpoint(directory, with_stand_ins=True).manifest
    removed = sorted(key for key in manifest.tensors if key.startswith(key_prefix))
    if not removed:
        logger.warning("removing tensors of %s: no key starts with %r, nothing was changed", directory, key_prefix)
        return []
    gone = set(removed)
    kept = replace(
        manifest,
        tensors={key: stored for key, stored in manifest.tensors.items() if key not in gone},
        flattened=manifest.flattened - gone,
        unflattened_shapes={key: shape for key, shape in manifest.unflattened_shapes.items() if key not in gone},
    )
    # Sums of what is about to change go first: without them the checkpoint is one that has no sums yet.
    store = store_of(directory)
    summed = [name for name in (CHECKSUMS_FNAME, SHA256_FNAME) if store.size_of(directory / name) is not None]
    for name in summed:
        store.remove(directory / name)
    store.sync_names(directory)
    write_manifest(directory, kept)
    needed = {extent.file for extent in kept.extents()}
    for name in {extent.file for extent in manifest.extents()} - needed:
        if PurePosixPath(name).name == name and is_data_file_name(name):
            store.remove(directory / name)
    if CHECKSUMS_FNAME in summed:
        replace_checksums(directory)
    if SHA256_FNAME in summed:
        write_sha256_manifest(directory)
    return removed
