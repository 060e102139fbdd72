"""Lock of a checkpoint directory: one save at a time, with takeover, and the commit that readers can complete.

    .remesh-save-in-progress      lock 0: a save has begun
    .remesh-save-in-progress.1    lock 1: another save has taken over, since it cannot know whether the first still runs
    .remesh-save-in-progress.2    the end: the save with lock 1 becomes the checkpoint, and no other ever will

A *lock* belongs to one save in a directory. The save with lock n closes it by creating lock file n + 1 as
*the end*; a newcomer takes over by creating the same file as a lock of its own. Lock files are created exclusively, so
one of the two succeeds, and the other gets an error. Nothing else decides which of several savers comes first, and no
clock does.

Until the end no two saves write files of one name: data files carry the number of the lock, and a small file that has a
fixed name in the format is *staged* as NAME.N, or in a folder as FOLDER/.remesh-N-NAME, where N is the number of the
lock. So a save that lost the lock may go on without harm. Once the end is there, staged files get their names, the last
one being the commit of the format. If the saver dies in between, the next process that looks renames them: all that is
needed is on disk by then, and every process does the same. With the last name the checkpoint is there. A failure after
that is logged, and nothing is raised.

A store without exclusive creation (see `Store.create_once`) separates only saves that do not begin in one instant.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from remesh.checkpoint.checkpoint_errors import CheckpointPathError, as_checkpoint_error
from remesh.checkpoint.storage import Location, store_of
from remesh.foundation.errors import Error

logger = logging.getLogger(__name__)
IN_PROGRESS_FNAME = ".remesh-save-in-progress"
_LOCK_FILE = re.compile(re.escape(IN_PROGRESS_FNAME) + r"(?:\.([1-9][0-9]*))?")
_STAGED = re.compile(r"(.+)\.([0-9]+)")
_STAGED_IN_FOLDER = re.compile(r"\.remesh-([0-9]+)-.+")


@dataclass(frozen=True, slots=True)
class SaveLock:
    """Lock of one save in a directory. Every rank of the save has the value; the first one has taken it."""

    directory: Location
    number: int = 0
    """How many saves were there before without becoming a checkpoint."""

    @property
    def path(self) -> Location:
        """The lock file."""
        return _lock_path(self.directory, self.number)

    def staged(self, name: str) -> Location:
        """The path of a file until the save is committed."""
        return self.directory / self.staged_name(name)

    def staged_name(self, name: str) -> str:
        """The name of a file until the save is committed, from the directory like ``name``.

        >>> from pathlib import Path
        >>> lock = SaveLock(Path("run"), 1)
        >>> lock.staged_name("common.pt"), lock.staged_name("layer.w/0.1")
        ('common.pt.1', 'layer.w/.remesh-1-0.1')
        """
        folder, slash, plain = name.rpartition("/")
        return f"{folder}/.remesh-{self.number}-{plain}" if slash else f"{name}.{self.number}"


@dataclass(frozen=True, slots=True)
class _LockFile:
    number: int
    staged: tuple[str, ...] | None
    """Of the end of the lock before, the names of its staged files; None for a lock."""


def is_lock_file(name: str) -> bool:
    """Whether a file of that name is one of the chain."""
    return _LOCK_FILE.fullmatch(name) is not None


def staged_name(name: str) -> str | None:
    """The name that a staged file is to have; None for a file that is not staged."""
    match = _STAGED.fullmatch(name)
    return match[1] if match is not None and not is_lock_file(name) else None


def lock_staged_in_folder(name: str) -> int | None:
    """The number of the lock that has staged a file of that name in a folder; None for any other file."""
    match = _STAGED_IN_FOLDER.fullmatch(name)
    return int(match[1]) if match is not None else None


def take_lock(directory: Location) -> SaveLock:
    """Take the lock of the directory, which this save has until another one takes over. Called by one rank.

    A save that had come to its end and died is completed. Raises `CheckpointPathError` when another save has begun in
    the same instant, or ended. The holder must look once more whether a checkpoint is there, and withdraw: lock files
    are removed when one is, so the lock can be taken then, too.
    """
    last = _last_lock_file(directory)
    if last is not None and last.staged is not None:
        _give_names(SaveLock(directory, last.number - 1), last.staged)
        raise _ended(directory)
    number = 0 if last is None else last.number + 1
    if not _create(directory, number, {"turn": uuid.uuid4().hex}):
        raise CheckpointPathError(
            f"saving checkpoint {directory}: another save began there at the same moment, expected only one; nothing "
            "was written, choose another directory or let only one job save there"
        )
    lock = SaveLock(directory, number)
    if last is not None and _read_lock_file(directory, last.number).staged is not None:
        withdraw(lock)
        raise _ended(directory)
    return lock


def withdraw(lock: SaveLock) -> None:
    """Leave a directory that turned out to hold a checkpoint."""
    store_of(lock.directory).remove(lock.path)


@contextmanager
def held(lock: SaveLock) -> Iterator[None]:
    """Errors that leave the block as this room's, and as that of a lost lock if another save has taken over by then."""
    try:
        yield
    except (OSError, Error) as raised:
        # The later file first: when another save has ended, lock files go in the order in which they came.
        if not _exists(_next(lock).path) and _exists(lock.path):
            raise as_checkpoint_error(f"saving checkpoint {lock.directory}", raised)  # noqa: B904 - it brings its cause
        raise _lost(lock) from raised


def check_found(lock: SaveLock) -> None:
    """Raise `CheckpointPathError` unless this rank finds the lock, which the first one has taken, in its directory.

    For a rank that writes nothing: of one that does, the first rank looks for the files.
    """
    if _exists(_next(lock).path):
        raise _lost(lock)
    if not _exists(lock.path):
        raise not_shared(lock.directory, f"the file {lock.path.name}")


def close_lock(lock: SaveLock, names: Sequence[str], seal: bytes) -> None:
    """Close the lock: its save becomes the checkpoint, and its staged files get their names, in this order.

    All files must have reached the disk. The last name is the commit of the format; ``seal`` is the content of the file
    before it, which no other save has. Called by one rank; raises `CheckpointPathError` when another save has taken
    over.
    """
    store, end = store_of(lock.directory), _next(lock)
    fields = {"turn": uuid.uuid4().hex, "staged": list(names)}
    try:
        is_ours = _create(end.directory, end.number, fields)
        if is_ours:
            is_named = _exists(lock.directory / names[-1])
            if _exists(_next(end).path) or (is_named and store.read(lock.directory / names[-2]) != seal):
                # It was free because another save had ended, and its lock files were being removed.
                store.remove(end.path)
                is_ours = False
            else:
                _give_names(lock, names)
    except (OSError, Error) as raised:
        raise _not_ended(end, raised) from raised
    if not is_ours:
        raise _lost(lock)


def finish_ended(directory: Location) -> bool:
    """Give the names that a save which had come to its end has not given any more; whether there was one."""
    last = _last_lock_file(directory)
    if last is None or last.staged is None:
        return False
    _give_names(SaveLock(directory, last.number - 1), last.staged)
    return True


def is_commit(directory: Location, name: str) -> bool:
    """Whether a file of that name, found there, commits a checkpoint: no lock file is there, or the end names it last.

    Lock files may be there beside a checkpoint whose store did not allow to remove them.
    """
    last = _last_lock_file(directory)
    return last is None or (last.staged is not None and last.staged[-1:] == (name,))


@contextmanager
def tidying(directory: Location, left: Sequence[str]) -> Iterator[None]:
    """Around what is only cleared away of a checkpoint that is there: a failure is logged, with what is left.

    The block takes out of ``left`` what it has removed.
    """
    try:
        yield
    except (OSError, Error) as raised:
        logger.warning(
            "saving checkpoint %s: it is saved, but %s could not be removed (%s); no reader minds, and a later look at "
            "the directory tries again",
            directory,
            ", ".join(left),
            raised,
        )


def _give_names(lock: SaveLock, names: Sequence[str]) -> None:
    """Any number of processes may do this at once, or again after one that died."""
    store, directory = store_of(lock.directory), lock.directory
    *others, last = names
    if not _exists(directory / last):
        for name in others:
            store.rename(lock.staged(name), directory / name)
        for place in dict.fromkeys((directory / name).parent for name in others):
            store.sync_names(place)
        _give_last(lock, last)
    left = [_lock_path(directory, number).name for number in range(lock.number + 2)]
    with tidying(directory, left):
        while left:  # the end goes last: the names in it are needed until then
            store.remove(directory / left[0])
            del left[0]


def _give_last(lock: SaveLock, last: str) -> None:
    """The commit. Once the name is there no error leaves, not even of the rename: its answer may have been lost."""
    store, directory = store_of(lock.directory), lock.directory
    is_given = False
    try:
        is_given = store.rename(lock.staged(last), directory / last)
        store.sync_names(directory)
    except (OSError, Error) as raised:
        if not is_given and not _exists(directory / last):
            raise
        logger.warning(
            "saving checkpoint %s: it is saved, but %s failed after it had its name (%s); a crash of this machine may "
            "take that name back",
            directory,
            last,
            raised,
        )
        return
    if not is_given and not _exists(directory / last):  # nor has another process given it
        raise CheckpointPathError(
            f"ending the save in {directory}: expected the file {lock.staged(last)}, found none; another program has "
            "removed files of this checkpoint, remove the directory"
        )


def _next(lock: SaveLock) -> SaveLock:
    return SaveLock(lock.directory, lock.number + 1)


def _exists(path: Location) -> bool:
    return store_of(path).size_of(path) is not None


def _last_lock_file(directory: Location) -> _LockFile | None:
    try:
        matches = [_LOCK_FILE.fullmatch(entry.name) for entry in store_of(directory).entries(directory)]
    except FileNotFoundError:  # where directories are nothing by themselves
        return None
    numbers = [int(match[1] or 0) for match in matches if match is not None]
    return _read_lock_file(directory, max(numbers)) if numbers else None


def _read_lock_file(directory: Location, number: int) -> _LockFile:
    path = _lock_path(directory, number)
    try:
        content = json.loads(store_of(path).read(path) or b"{}")
        staged = content.get("staged")
        return _LockFile(number, None if staged is None else tuple(map(str, staged)))
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        # Its checkpoint has come to be; or the file is partial, in a store whose files appear in parts.
        return _LockFile(number, None)


def _lock_path(directory: Location, number: int) -> Location:
    return directory / (IN_PROGRESS_FNAME if number == 0 else f"{IN_PROGRESS_FNAME}.{number}")


def _create(directory: Location, number: int, content: Mapping[str, object]) -> bool:
    path, blob = _lock_path(directory, number), json.dumps(content).encode()
    store = store_of(path)
    try:
        return store.create_once(path, blob)
    except (OSError, Error):
        with suppress(OSError, Error):
            if store.read(path) == blob:  # it is done, and its store failed after that
                return True
        raise


def not_shared(directory: Location, what: str) -> CheckpointPathError:
    """The error for something that another rank of the save has made, and that this rank does not find."""
    return CheckpointPathError(
        f"saving checkpoint {directory}: expected {what}, which another rank of this save has made, found none; give "
        "all ranks the same path, on storage that all of them share"
    )


def _lost(lock: SaveLock) -> CheckpointPathError:
    store = store_of(lock.directory)
    if store.has_directories and not store.is_directory(lock.directory):
        return not_shared(lock.directory, "the directory")
    return CheckpointPathError(
        f"saving checkpoint {lock.directory}: another save has taken this directory over while this one was writing, "
        "expected one save for a directory; nothing of this one is in the other's checkpoint. See whether a job that "
        "was started again still runs, or give every job a folder of its own"
    )


def _not_ended(end: SaveLock, raised: OSError | Error) -> BaseException:
    """The error for an end that came to be or not, and whose checkpoint is not there."""
    doing = f"saving checkpoint {end.directory}"
    with suppress(OSError, Error):
        if not _exists(end.path):
            return as_checkpoint_error(doing, raised)
    return CheckpointPathError(
        f"{doing}: all of it is written, but its files could not be given their names ({raised}); the next load or "
        "save that looks there may still complete it, so remove the directory if it is not to become a checkpoint"
    )


def _ended(directory: Location) -> CheckpointPathError:
    return CheckpointPathError(
        f"saving checkpoint {directory}: directory {directory} already holds a complete checkpoint, of a save that "
        "came to its end in this instant or died at it; nothing was overwritten, choose another directory or remove "
        "this one"
    )
