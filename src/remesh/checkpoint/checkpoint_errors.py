"""Errors of checkpoints: each is a `CheckpointingException` and also the root package's type of who must act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from remesh.foundation.errors import DeviceError, Error, FormatError, LayoutError, StorageError


class CheckpointingException(Error):
    """Root of the errors that ``save`` and ``load`` raise, on all ranks alike."""


class CheckpointPathError(CheckpointingException, StorageError):
    """The directory is missing, taken, full or not writable; the caller must mend the path, space or rights."""


class StoreFailedError(CheckpointPathError):
    """A store has given no answer, so nothing is known of what is there."""


class CheckpointFormatError(CheckpointingException, FormatError):
    """The files of a checkpoint are incomplete, damaged, foreign or hostile; see ``reason`` for the kind."""

    def __init__(self, reason: str, message: str) -> None:
        FormatError.__init__(self, reason, message)


class CheckpointMismatchError(CheckpointingException, LayoutError, AssertionError):
    """The state dict contradicts itself, other ranks or the checkpoint; the caller must mend the description.

    An AssertionError too, since programs for Megatron Core expect one of the two for much of this.
    """


class CheckpointDeviceError(CheckpointingException, DeviceError):
    """A device or its driver refuses to copy what is to be saved, or is lost; the save does not exist."""


def as_checkpoint_error(doing: str, raised: BaseException) -> BaseException:
    """A system, device or layout error as one of this room, with ``doing`` first; any other as it is."""
    translated: BaseException = raised
    if isinstance(raised, LayoutError) and not str(raised).startswith(doing):
        translated = CheckpointMismatchError(f"{doing}: {raised}")
    elif isinstance(raised, DeviceError) and not isinstance(raised, CheckpointingException):
        translated = CheckpointDeviceError(str(raised))
    elif isinstance(raised, OSError) and not isinstance(raised, Error):
        translated = CheckpointPathError(
            f"{doing}: the operating system refused with {raised}; correct the path, the rights or the space and try "
            "again"
        )
    if translated is not raised:
        translated.__cause__ = raised
    return translated


@contextmanager
def as_checkpoint_errors(doing: str) -> Iterator[None]:
    """Give system, device and layout errors that leave the block this room's types, with ``doing`` first."""
    try:
        yield
    except (Error, OSError) as raised:
        raise as_checkpoint_error(doing, raised)  # noqa: B904 - it brings its cause
