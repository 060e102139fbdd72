"""What lies in a directory beside tensors, and when is it a checkpoint? Names, marker, common data, and the commit.

    begin    the in-progress mark is written, leftovers of a failed save are removed
    (write)  data files, each reaching the disk; common data and .metadata
    finish   the checksums of all files are written; they and the small files reach the disk together
             metadata.json appears in one step: from here on the checkpoint exists
             the in-progress mark is removed

A crash anywhere before ``finish`` leaves a directory without ``metadata.json``, which no reader takes for a
checkpoint and which the next save may replace. A directory that holds a complete checkpoint is never written to.
Called by one rank, between collectives that keep the others waiting.

The marker ``metadata.json`` says of which format a checkpoint is. It holds exactly four fields, because readers of the
time refuse any further one; newer writers leave out the two that name the common backend.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from remesh.checkpoint.errors import CheckpointFormatError, CheckpointPathError
from remesh.checkpoint.formats.objects import dump_object, load_object
from remesh.checkpoint.formats.zarr_format import remove_arrays
from remesh.checkpoint.storage import Directory, Location, location_of, store_of
from remesh.checkpoint.storage.integrity import BLOCKS_FNAME, CHECKSUMS_FNAME, write_checksums

CONFIG_FNAME = "metadata.json"
COMMON_STATE_FNAME: Final = "common.pt"
METADATA_FNAME = ".metadata"
COLUMNS_FNAME = ".remesh-index"
IN_PROGRESS_FNAME = ".remesh-save-in-progress"
_SUFFIX = ".distcp"


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


def data_file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"__{rank}_0{_SUFFIX}"


def is_data_file_name(name: str) -> bool:
    """Whether a file name is one that this writer may have given to a data file, with a hint before it or not."""
    _, mark, numbers = name.removesuffix(_SUFFIX).rpartition("__")
    return name.endswith(_SUFFIX) and bool(mark) and numbers.replace("_", "").isdigit()


@dataclass
class CheckpointingConfig:
    """Content of the marker: which format the tensors and the common data are in."""

    sharded_backend: str
    """Format of the sharded tensors, ``"torch_dist"``."""
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    """Format of the common data; ``"torch"`` is the file ``common.pt``."""
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: Directory) -> bool:
    """Whether the directory holds a committed checkpoint of this package's formats."""
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: Directory | None) -> CheckpointingConfig | None:
    """The marker of a checkpoint, or None when there is none. Fields of later versions are ignored."""
    if not checkpoint_dir:
        return None
    path = location_of(checkpoint_dir) / CONFIG_FNAME
    try:
        content = store_of(path).read(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    try:
        found = json.loads(content)
        known = {field.name: found[field.name] for field in fields(CheckpointingConfig) if field.name in found}
        config = CheckpointingConfig(**known)
    except (ValueError, TypeError, RecursionError) as raised:
        raise CheckpointFormatError(
            "bad-config",
            f"reading the marker {path}: expected a JSON object with the field sharded_backend, found: {raised}; "
            "the checkpoint is damaged, use another one",
        ) from raised
    if not isinstance(config.sharded_backend, str) or not isinstance(config.sharded_backend_version, int):
        raise CheckpointFormatError(
            "bad-config",
            f"reading the marker {path}: expected a backend name and a version number, found "
            f"{config.sharded_backend!r} and {config.sharded_backend_version!r}; the checkpoint is damaged",
        )
    return config


def save_config(config: CheckpointingConfig, checkpoint_dir: Directory) -> None:
    """Write the marker in one step, durably: after a crash it is there in full or not at all.

    This is the commit of a save: call it last, from one rank, when all else has reached the disk.
    """
    path = location_of(checkpoint_dir) / CONFIG_FNAME
    store_of(path).put(path, json.dumps(asdict(config)).encode())


def save_common(common_state_dict: dict[str, Any], checkpoint_dir: Directory) -> None:
    """Write the common data durably; called by one rank."""
    path = location_of(checkpoint_dir) / COMMON_STATE_FNAME
    store_of(path).put(path, dump_object(common_state_dict, "the common data"))


def load_common(checkpoint_dir: Directory) -> dict[str, Any]:
    """The common data of a checkpoint, tensors on the CPU."""
    path = location_of(checkpoint_dir) / COMMON_STATE_FNAME
    try:
        content = store_of(path).read(path)
    except FileNotFoundError as raised:
        raise CheckpointFormatError(
            "missing-common",
            f"loading common data: {path} does not exist, expected it beside the other files; the checkpoint is "
            "incomplete, use another one",
        ) from raised
    common = load_object(content, str(path))
    if not isinstance(common, dict):
        raise CheckpointFormatError(
            "bad-common", f"loading common data: {path} holds a {type(common).__name__}, expected a dict"
        )
    return common
