"""Errors, grouped by who must act.

Every message has four parts: what was being done; to which tensor, rank or file; what was expected
against what was found; what to do next. A distributed function raises the same error on all ranks.
"""


class Error(Exception):
    """Base class of the errors that Remesh raises."""


class LayoutError(Error, ValueError):
    """A box, mesh, sharding spec or layout contradicts itself; the caller must mend the description."""


class PlanError(Error, ValueError):
    """Two layouts, or the plan between them, cannot be joined; the caller must mend one side."""


class StorageError(Error, OSError):
    """A file or directory cannot be used as asked; the caller must mend the path, space or rights."""


class PeerError(Error, RuntimeError):
    """Another rank died, left or disagrees; the job must meet again on a new mesh."""


class EndedError(PeerError, ProcessLookupError):
    """A process of this machine that was to be looked at has ended, or was killed meanwhile."""


class FormatError(Error, ValueError):
    """Files are damaged, foreign or hostile; the reader must choose another source.

    ``reason`` is a short stable code (``"missing-metadata"``, ``"truncated"``, ``"forbidden-global"``, ...)
    for programs; the message is for people.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(Error, ValueError):
    """The user asked for something that cannot be (mesh, flags, script); the user must mend the request."""


class DeviceError(Error, RuntimeError):
    """A device or its driver refuses, or is lost; the user must free memory, or begin in a new process."""


class ForkError(Error, RuntimeError):
    """What is waited for belongs to the process that this one is a fork of; ask there."""
