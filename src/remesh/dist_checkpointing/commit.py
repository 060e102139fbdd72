"""When does a checkpoint exist? The steps of a commit, in the directory of the checkpoint.

    begin    the in-progress mark is written, leftovers of a failed save are removed
    (write)  data files, common data, .metadata, each reaching the disk
    finish   the checksums of all files are written
             metadata.json appears in one step: from here on the checkpoint exists
             the in-progress mark is removed

A crash anywhere before ``finish`` leaves a directory without ``metadata.json``, which no reader takes for a
checkpoint and which the next save may replace. A directory that holds a complete checkpoint is never written to.
Called by one rank, between collectives that keep the others waiting.
"""

from __future__ import annotations

from pathlib import Path

from remesh.dist_checkpointing.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    save_config,
    sync_directory,
)
from remesh.dist_checkpointing.errors import CheckpointPathError
from remesh.dist_checkpointing.integrity import CHECKSUMS_FNAME, write_checksums
from remesh.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from remesh.dist_checkpointing.strategies.torch_format import METADATA_FNAME, is_data_file_name

IN_PROGRESS_FNAME = ".remesh-save-in-progress"


def check_can_save(directory: Path, *, may_create: bool = False) -> None:
    """Raise `CheckpointPathError` unless the directory exists, or may be created, and holds no complete checkpoint."""
    if may_create and not directory.exists():
        return
    if not directory.is_dir():
        kind = "it is a file" if directory.exists() else "no such directory"
        raise CheckpointPathError(
            f"saving checkpoint: Checkpoint directory {directory} does not exist ({kind}), expected an empty "
            "directory; create it first"
        )
    if (directory / CONFIG_FNAME).exists():
        raise _taken(directory, CONFIG_FNAME, "a complete checkpoint")
    if (directory / METADATA_FNAME).exists() and not (directory / IN_PROGRESS_FNAME).exists():
        raise _taken(directory, METADATA_FNAME, "a checkpoint of native torch, or one that another program left")


def begin(directory: Path) -> None:
    """Create the directory if need be, mark it as being written, and remove what a failed save left there."""
    if not directory.exists():
        directory.mkdir(parents=True)
        sync_directory(directory.parent)
    (directory / IN_PROGRESS_FNAME).touch()
    sync_directory(directory)
    for path in directory.iterdir():
        if is_leftover(path.name):
            path.unlink()


def finish(directory: Path, config: CheckpointingConfig) -> None:
    """Make the checkpoint exist. Everything else must have reached the disk."""
    write_checksums(directory)
    sync_directory(directory)
    save_config(config, directory)
    (directory / IN_PROGRESS_FNAME).unlink(missing_ok=True)


def is_leftover(name: str) -> bool:
    """Whether a file of that name, in a directory without a complete checkpoint, comes from a failed save."""
    fixed = (METADATA_FNAME, COMMON_STATE_FNAME, CONFIG_FNAME, CHECKSUMS_FNAME)
    return is_data_file_name(name) or name in fixed or name.removesuffix(".tmp") in fixed


def _taken(directory: Path, name: str, what: str) -> CheckpointPathError:
    return CheckpointPathError(
        f"saving checkpoint: directory {directory} already holds {what} ({name}), expected a directory without one; "
        "nothing was overwritten, choose another directory or remove this one"
    )
