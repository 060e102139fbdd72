"""Checkpoint directory: file names, the marker, common data, and the commit of a save.

    begin    the save takes the lock (`storage.save_lock`); data of saves that lost it is removed
    (write)  data files, each reaching the disk; common data and .metadata, staged under the lock's number
    finish   the checksums of all files and the marker are staged, too; all small files reach the disk together
             the lock is closed, unless another save has taken it over: from here on no other can become the checkpoint
             staged files get their names, metadata.json last: from here on the checkpoint exists
             lock files are removed, and what earlier saves have left; if that fails the save has succeeded

A crash before the lock is closed leaves a directory that no reader takes for a checkpoint and that the next save may
have. After a crash behind that point the next process that looks, reader or writer, completes the commit. A directory
that holds a complete checkpoint is never written to. Called by one rank, between collectives that keep the others
waiting.

The marker ``metadata.json`` names the format of a checkpoint. It holds exactly four fields, because readers of the time
refuse any further one; newer writers leave out the two that name the common backend.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointPathError
from remesh.checkpoint.formats.data_file import dump_object, load_object
from remesh.checkpoint.formats.zarr_format import remove_arrays, remove_staged
from remesh.checkpoint.storage import Directory, Location, location_of, store_of
from remesh.checkpoint.storage.integrity import (
    BLOCKS_FNAME,
    CHECKSUMS_FNAME,
    encode_checksums,
    files_in_blocks,
    parsing,
)
from remesh.checkpoint.storage.save_lock import (
    IN_PROGRESS_FNAME,
    SaveLock,
    close_lock,
    finish_ended,
    held,
    is_lock_file,
    not_shared,
    staged_name,
    take_lock,
    tidying,
    withdraw,
)
from remesh.foundation.torch_private import never_compiled

CONFIG_FNAME = "metadata.json"
COMMON_STATE_FNAME: Final = "common.pt"
METADATA_FNAME = ".metadata"
COLUMNS_FNAME = ".remesh-index"
METRICS_FNAME: Final = "metrics.json"
_SMALL = (METADATA_FNAME, COLUMNS_FNAME, COMMON_STATE_FNAME, BLOCKS_FNAME)
FIXED_FNAMES = (*_SMALL, METRICS_FNAME, CONFIG_FNAME, CHECKSUMS_FNAME)
"""Files of a checkpoint that are no data of tensors."""
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
    _check_has_no_checkpoint(directory, {entry.name for entry in store.entries(directory)})


def begin(directory: Location) -> SaveLock:
    """Create the directory if need be, take its lock, and remove what earlier saves have left."""
    store = store_of(directory)
    if not store.is_directory(directory):
        store.make_directory(directory)
    lock = take_lock(directory)
    names = {entry.name for entry in store.entries(directory)}
    try:
        _check_has_no_checkpoint(directory, names - {lock.path.name})
    except CheckpointPathError:
        withdraw(lock)
        raise
    if lock.number:
        with held(lock):
            remove_staged(directory, before=lock.number)
    for name in names:
        if _is_of_earlier_lock(name, lock):
            store.remove(directory / name)
    return lock


def finish(lock: SaveLock, config: CheckpointingConfig | None) -> None:
    """Make the checkpoint exist; without a config the data of a strategy by itself, which has no marker.

    All data files must have reached the disk.
    """
    store, directory = store_of(lock.directory), lock.directory
    with held(lock):
        names = {entry.name for entry in store.entries(directory)}
        where = _files_of(lock, names)
        is_zarr = lock.staged(BLOCKS_FNAME).name in names
        cells = set(files_in_blocks(where[BLOCKS_FNAME])) if is_zarr else set()
        sums = encode_checksums(where)
        store.write_soon(lock.staged(CHECKSUMS_FNAME), sums)
        if config is not None:
            store.write_soon(lock.staged(CONFIG_FNAME), _dump_config(config))
        unmarked = BLOCKS_FNAME if is_zarr else METADATA_FNAME
        commit = unmarked if config is None else CONFIG_FNAME
        staged = [name for name in where if lock.staged(name).name in names and name != commit]
        # Metrics have no checksum, since a user may correct them.
        staged += [name for name in (METRICS_FNAME,) if lock.staged(name).name in names]
        staged += [CHECKSUMS_FNAME, commit]
        fixed = {*staged, *where} & {*FIXED_FNAMES}
        store.settle([lock.staged(name) if name in staged else where[name] for name in fixed])
        if config is None:
            store.remove(directory / commit)  # of an aborted save: its being there would be taken for the commit
    close_lock(lock, [*sorted(cells), *staged], seal=sums)
    _clear_away(lock, cells, {*where, *staged})


def _clear_away(lock: SaveLock, cells: set[str], kept: set[str]) -> None:
    """Remove what saves before, which were given up on, have left beside a checkpoint that is there."""
    store, directory = store_of(lock.directory), lock.directory
    if lock.number:
        with tidying(directory, ["arrays of a save that was given up on"]):
            remove_arrays(directory, kept=cells)
    left = ["what a save that was given up on may have left"]
    with tidying(directory, left):
        names = [entry.name for entry in store.entries(directory)]
        left[:] = [name for name in names if is_leftover(name) and name not in kept]
        while left:
            store.remove(directory / left[0])
            del left[0]


def is_leftover(name: str) -> bool:
    """Whether a file of that name, in a directory without a complete checkpoint, comes from a failed save."""
    plain = name.removesuffix(".tmp")
    return (
        is_data_file_name(name)
        or plain in FIXED_FNAMES
        or staged_name(plain) in FIXED_FNAMES
        or _is_partial_lock_file(name)
    )


def _is_partial_lock_file(name: str) -> bool:
    return name.endswith(".tmp") and name.startswith(IN_PROGRESS_FNAME)


def _is_of_earlier_lock(name: str, lock: SaveLock) -> bool:
    """Whether a file is of an earlier save. Its name decides: a later save, which may have begun since, uses others."""
    if is_data_file_name(name):
        return int(name.removesuffix(_SUFFIX).rpartition("_")[2] or 0) < lock.number
    return staged_name(name) in FIXED_FNAMES and int(name.rpartition(".")[2]) < lock.number


def _files_of(lock: SaveLock, names: set[str]) -> dict[str, Location]:
    """Final name to current location of each file of this save; the two differ only while a file is staged.

    Of data files those in the index, all of which must be there. If another program made that, under its own name, all
    that are there count. Cells of zarr are summed up in one of these files.
    """
    staged = {name: lock.staged(name) for name in _SMALL if lock.staged(name).name in names}
    data = {name for name in names if is_data_file_name(name)}
    if COLUMNS_FNAME in staged:
        head = store_of(lock.directory).read(staged[COLUMNS_FNAME]).partition(b"\n")[0]
        data = {*json.loads(head)["files"]}
        check_seen(lock.directory, sorted(data - names))
    else:
        data |= {*_SMALL} & names
    return {name: lock.directory / name for name in sorted(data)} | staged


def check_seen(directory: Location, names: Iterable[str]) -> None:
    """Raise `CheckpointPathError` unless these files, which ranks have written, are where this rank looks for them."""
    for name in names:
        if store_of(directory).size_of(directory / name) is None:
            raise not_shared(directory, f"the file {name}")


def _check_has_no_checkpoint(directory: Location, names: set[str]) -> None:
    if CONFIG_FNAME in names:
        raise _taken(directory, CONFIG_FNAME, "a complete checkpoint")
    if METADATA_FNAME in names and not any(map(is_lock_file, names)):
        raise _taken(directory, METADATA_FNAME, "a checkpoint of native torch, or one that another program left")
    if BLOCKS_FNAME in names and not any(map(is_lock_file, names)):
        raise _taken(directory, BLOCKS_FNAME, "arrays of zarr, which a strategy by itself has left")


def _taken(directory: Location, name: str, what: str) -> CheckpointPathError:
    return CheckpointPathError(
        f"saving checkpoint: directory {directory} already holds {what} ({name}), expected a directory without one; "
        "nothing was overwritten, choose another directory or remove this one"
    )


def data_file_name(rank: int, lock: int = 0) -> str:
    """Name of the file that a rank writes when so many saves into its directory were given up on before."""
    return f"__{rank}_{lock}{_SUFFIX}"


def lone_file_name(rank: int) -> str:
    """Name of a data file that no other save gives, for a rank that does not know how many were given up on before."""
    return f"__{rank}_{secrets.randbits(48)}_0{_SUFFIX}"


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


@never_compiled
def check_is_distributed_checkpoint(checkpoint_dir: Directory) -> bool:
    """Whether the directory holds a committed checkpoint of this package's formats."""
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: Directory | None) -> CheckpointingConfig | None:
    """The marker of a checkpoint, or None when there is none. Fields of later versions are ignored."""
    if not checkpoint_dir:
        return None
    path = location_of(checkpoint_dir) / CONFIG_FNAME
    content = _marker_in(location_of(checkpoint_dir))
    if content is None:
        return None
    hint = "the checkpoint is damaged, use another one"
    expected = "a JSON object with the field sharded_backend"
    with parsing("bad-config", f"reading the marker {path}", expected, hint):
        found = json.loads(content)
        known = {field.name: found[field.name] for field in fields(CheckpointingConfig) if field.name in found}
        config = CheckpointingConfig(**known)
        if not isinstance(config.sharded_backend, str) or not isinstance(config.sharded_backend_version, int):
            raise TypeError(f"backend {config.sharded_backend!r} of version {config.sharded_backend_version!r}")
        return config


def save_config(config: CheckpointingConfig, checkpoint_dir: Directory) -> None:
    """Write the marker in one step, durably: after a crash it is there in full or not at all.

    For programs that write all else themselves: call it last, from one rank, when that has reached the disk.
    """
    path = location_of(checkpoint_dir) / CONFIG_FNAME
    store_of(path).put(path, _dump_config(config))


def _dump_config(config: CheckpointingConfig) -> bytes:
    return json.dumps(asdict(config)).encode()


def _marker_in(directory: Location) -> bytes | None:
    """The marker's content; of a save that died at its very end it gets its name now."""
    path = directory / CONFIG_FNAME
    store = store_of(path)
    nothing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    with contextlib.suppress(*nothing):
        return store.read(path)
    with contextlib.suppress(*nothing):
        try:
            if finish_ended(directory):
                return store.read(path)
        except OSError as raised:  # a process that may not write waits until another one looks
            if not isinstance(raised, PermissionError) and raised.errno != errno.EROFS:
                raise
    return None


def stage_small(lock: SaveLock, blob: bytes, name: str = COMMON_STATE_FNAME) -> None:
    """Write serialised common data, or another small file, where no reader looks yet.

    The commit makes it durable and gives it its name.
    """
    store_of(lock.directory).write_soon(lock.staged(name), blob)


def save_common(common_state_dict: dict[str, Any], checkpoint_dir: Directory) -> None:
    """Write the common data durably; called by one rank."""
    path = location_of(checkpoint_dir) / COMMON_STATE_FNAME
    store_of(path).put(path, dump_object(common_state_dict, "the common data"))


def load_common(checkpoint_dir: Directory, *, with_stand_ins: bool = False) -> dict[str, Any]:
    """The common data of a checkpoint, tensors on the CPU, as `load_object` gives it."""
    path = location_of(checkpoint_dir) / COMMON_STATE_FNAME
    try:
        content = store_of(path).read(path)
    except FileNotFoundError as raised:
        raise CheckpointFormatError(
            "missing-common",
            f"loading common data: {path} does not exist, expected it beside the other files; the checkpoint is "
            "incomplete, use another one",
        ) from raised
    common = load_object(content, str(path), with_stand_ins=with_stand_ins)
    if not isinstance(common, dict):
        raise CheckpointFormatError(
            "bad-common", f"loading common data: {path} holds a {type(common).__name__}, expected a dict"
        )
    return common
