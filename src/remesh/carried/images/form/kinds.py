"""Requests to the image engine and its answers: plain values, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from remesh.foundation.errors import ConfigError

SITE_PATH: Final = "/tmp/.remesh"
"""The folder of the upper half's own mount namespace where its channel and logs stand. The same on every machine."""
CHANNEL_PATH: Final = f"{SITE_PATH}/channel"
"""The path where the upper half finds its channel: the file `Site.channel_file`, bound to this path."""
ARENA_PATH: Final = f"{SITE_PATH}/arena"
"""The path of the file that its arrays may stand in: `Site.arena_file`, bound to this path, if there is one."""
SHARED_PATH: Final = f"{SITE_PATH}/shared"
"""The path of the folder of files that programs of this machine map together: `Site.shared_folder`, if there is one.
The one that takes images of all of them sees to the bytes of those files; an image holds none."""
STDOUT_PATH: Final = f"{SITE_PATH}/stdout"
STDERR_PATH: Final = f"{SITE_PATH}/stderr"
INNER_PID: Final = 1000
"""The process id that an upper half has inside its own pid namespace, unless its command asks for another."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start: nothing is added to its arguments and no shell sees them."""

    argv: tuple[str, ...]  # argv[0] is looked up on the PATH of `environment`; not empty
    environment: Mapping[str, str]  # the whole environment of the program
    folder: str  # its working directory, absolute
    input_file: str = "/dev/null"  # its stdin, opened for reading
    input_position: int = 0  # from where on it reads that
    pid: int = INNER_PID  # its process id in its own pid namespace; not 1, which has signal rules of its own

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("describing a program: argv is empty, expected a program and its arguments")
        if not self.folder.startswith("/"):
            raise ConfigError(f"describing a program: its folder is {self.folder!r}, expected an absolute path")


@dataclass(frozen=True, slots=True)
class Site:
    """The files of this machine that an upper half is bound to. They exist; paths are absolute."""

    channel_file: str  # bound to CHANNEL_PATH; never truncated or replaced while the upper half lives
    stdout_file: str  # opened for append
    stderr_file: str  # opened for append
    arena_file: str = ""  # bound to ARENA_PATH; its pages are part of an image where it is mapped. "": there is none
    shared_folder: str = ""  # bound to SHARED_PATH. "": there is none

    def __post_init__(self) -> None:
        paths = (self.channel_file, self.stdout_file, self.stderr_file, self.arena_file, self.shared_folder)
        for path in filter(None, paths):
            if not path.startswith("/"):
                raise ConfigError(f"describing the files of an upper half: {path!r} is not an absolute path")


@dataclass(frozen=True, slots=True)
class ImageRefusal:
    """One thing about a process that an image cannot hold."""

    what: str  # the offender: "descriptor 5, socket:[1234]"
    why: str  # the reason, and what to do
    is_passing: bool = False  # it is so for a moment only, and no fault of the program

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class NotImageable(ConfigError):
    """A process has something that an image cannot hold; ``refusals`` names each. Nothing was stopped."""

    def __init__(self, doing: str, refusals: list[ImageRefusal]) -> None:
        super().__init__(f"{doing}: " + "; ".join(str(refusal) for refusal in refusals))
        self.refusals = refusals


class OpenFilePolicy(enum.Enum):
    """The action of a restore on a file that the program had open for writing and that was written to since."""

    TRUNCATE = "truncate"  # cut it to its length at the image: the program will write the rest again
    KEEP = "keep"  # leave what was written since; an appending program goes on behind it
    REFUSE = "refuse"  # raise
    REWRITE = "rewrite"  # leave it, even where bytes that it had were changed: the program will write them again


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that processes of a tree may write to, as it was when they were frozen."""

    path: str
    is_open: bool  # for writing
    is_mapped: bool  # for writing
    num_bytes: int
    mtime_ns: int
    sha256: str  # of its bytes, or of samples (`identity.hash_of`)
    place: str = ""  # the same for all who have the file, on all hosts; "" of one read from an image
    seen_ns: int = 0  # when it was looked at, by the clock of its host


@dataclass(frozen=True, slots=True)
class ImageReport:
    """The report of `dump_image` on the image that it wrote."""

    num_bytes: int  # of all files of the image
    num_pages: int  # pages of memory that this image holds itself, 4096 bytes each
    num_pages_inherited: int  # pages that stand in the image it builds upon; 0 when it is full
    ancestors: tuple[str, ...]  # folders of the images where inherited pages are, absolute: all that it needs
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase: "inspect", "freeze", "state", "pages", ...
    not_tracked: str = ""  # why changed pages are not tracked from now on, though that was asked; "" otherwise
    shared_names: tuple[str, ...] = ()  # in /dev/shm, of memory that the image holds, sorted
    written_files: tuple[WrittenFile, ...] = ()  # that the processes may write to
