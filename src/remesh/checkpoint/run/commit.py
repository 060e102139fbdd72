"""When does a checkpoint exist? The steps of a commit, in the directory of the checkpoint.

    begin    the in-progress mark is written, leftovers of a failed save are removed
    (write)  data files, each reaching the disk; common data and .metadata
    finish   the checksums of all files are written; they and the small files reach the disk together
             metadata.json appears in one step: from here on the checkpoint exists
             the in-progress mark is removed

A crash anywhere before ``finish`` leaves a directory without ``metadata.json``, which no reader takes for a
checkpoint and which the next save may replace. A directory that holds a complete checkpoint is never written to.
Called by one rank, between collectives that keep the others waiting.
"""

from __future__ import annotations

from remesh.checkpoint.errors import CheckpointPathError
from remesh.checkpoint.formats.common_file import COMMON_STATE_FNAME
from remesh.checkpoint.formats.index_columns import COLUMNS_FNAME
from remesh.checkpoint.formats.marker import (
    CONFIG_FNAME,
    CheckpointingConfig,
    save_config,
)
from remesh.checkpoint.formats.torch_format import METADATA_FNAME, is_data_file_name
from remesh.checkpoint.formats.zarr_format import remove_arrays
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import BLOCKS_FNAME, CHECKSUMS_FNAME, write_checksums

IN_PROGRESS_FNAME = ".remesh-save-in-progress"


def check_can_save(directory: Location, *, may_create: bool = False) -> None:
    """Raise `CheckpointPathError` unless the directory exists, or may be created, and holds no complete checkpoint."""
    store = store_of(directory)
    if not store.is_directory(directory):
        is_file = store.size_of(directory) is not None
        if not is_file and (may_create or not store.has_directories):
            return
        kind = "it is a file" if is_file else "no such directory"
        raise CheckpointPathError(
            f"saving checkpoint: Checkpoint directory {directory} does not exist ({kind}), expected an empty "
            "directory; create it first"
        )
    names = {entry.name for entry in store.entries(directory)}
    if CONFIG_FNAME in names:
        raise _taken(directory, CONFIG_FNAME, "a complete checkpoint")
    if METADATA_FNAME in names and IN_PROGRESS_FNAME not in names:
        raise _taken(directory, METADATA_FNAME, "a checkpoint of native torch, or one that another program left")


def begin(directory: Location) -> None:
    """Create the directory if need be, mark it as being written, and remove what a failed save left there."""
    store = store_of(directory)
    if not store.is_directory(directory):
        store.make_directory(directory)
    elif store.size_of(directory / IN_PROGRESS_FNAME) is not None:
        remove_arrays(directory)
    store.mark(directory / IN_PROGRESS_FNAME)
    for entry in store.entries(directory):
        if is_leftover(entry.name):
            store.remove(directory / entry.name)


def finish(directory: Location, config: CheckpointingConfig) -> None:
    """Make the checkpoint exist. All data files must have reached the disk."""
    write_checksums(directory)
    store_of(directory).sync_names(directory)
    save_config(config, directory)
    store_of(directory).remove(directory / IN_PROGRESS_FNAME)


def is_leftover(name: str) -> bool:
    """Whether a file of that name, in a directory without a complete checkpoint, comes from a failed save."""
    fixed = (METADATA_FNAME, COLUMNS_FNAME, COMMON_STATE_FNAME, CONFIG_FNAME, CHECKSUMS_FNAME, BLOCKS_FNAME)
    return is_data_file_name(name) or name in fixed or name.removesuffix(".tmp") in fixed


def _taken(directory: Location, name: str, what: str) -> CheckpointPathError:
    return CheckpointPathError(
        f"saving checkpoint: directory {directory} already holds {what} ({name}), expected a directory without one; "
        "nothing was overwritten, choose another directory or remove this one"
    )
