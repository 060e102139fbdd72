"""How is an upper half started, brought back and ended? By a small init of ours in namespaces of its own.

`start_upper` and `restore_upper` are for the lower half; both return the running process as an `Upper`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from remesh.transparent.images.kinds import Command, OpenFilePolicy, Site


class Upper:
    """A running upper half, seen from the lower half."""

    pid: int
    """Its process id as this process sees it: for process_vm_readv, freeze and dump_image."""

    def fileno(self) -> int:
        """A descriptor that is readable once the upper half has ended; for select and poll."""
        raise NotImplementedError

    def poll(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that ended it."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> int:
        """Its exit status once it has ended; TimeoutError when it has not after ``timeout_s``."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it and everything in its namespaces now; no error if it has ended."""
        raise NotImplementedError


def start_upper(command: Command, site: Site, *, timeout_s: float = 60.0) -> Upper:
    """Start a program in namespaces of its own, with process id `INNER_PID` inside.

    Its stdin is /dev/null, its stdout and stderr are the site's files, it inherits no other descriptor. It ends when
    this process ends. Makes this process a child subreaper. Raises `ConfigError` when the kernel or the rights of this
    process do not allow it, or when the program does not exist.
    """
    raise NotImplementedError


def restore_upper(
    image: Path,
    site: Site,
    *,
    open_files: OpenFilePolicy = OpenFilePolicy.TRUNCATE,
    timeout_s: float = 600.0,
) -> Upper:
    """Bring the process of an image back, with the ids, memory, registers and open files it had; it runs on at once.

    The bytes of its channel are written into ``site.channel_file`` first. Raises `FormatError` when the image is
    damaged or does not fit this machine, `StorageError` when a file it had open is gone or changed.
    """
    raise NotImplementedError


def upper_environment(environ: Mapping[str, str], *, first_on_path: str | None = None) -> dict[str, str]:
    """An environment without the variables of MPI libraries and launchers; ``first_on_path`` leads its PYTHONPATH."""
    raise NotImplementedError
