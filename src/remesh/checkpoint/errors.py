"""Errors of this room: each one is a `CheckpointingException` and also the root package's type of who must act."""

from __future__ import annotations

from remesh.errors import Error, FormatError, LayoutError, StorageError


class CheckpointingException(Error):
    """Root of the errors that ``save`` and ``load`` raise, on all ranks alike."""


class CheckpointPathError(CheckpointingException, StorageError):
    """The directory is missing, taken, full or not writable; the caller must mend the path, space or rights."""


class CheckpointFormatError(CheckpointingException, FormatError):
    """What the directory holds is incomplete, damaged, foreign or hostile; see ``reason`` for the kind."""

    def __init__(self, reason: str, message: str) -> None:
        FormatError.__init__(self, reason, message)


class CheckpointMismatchError(CheckpointingException, LayoutError):
    """The state dict contradicts itself, other ranks or the checkpoint; the caller must mend the description."""
