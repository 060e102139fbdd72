"""Process images: a running process, written to a folder and brought back with the same ids, memory and open files.

x86-64 Linux only. `start_upper` starts a process so that it can be imaged at any instruction; `check_imageable` says
what in a process stands against it; `dump_image` writes it; `restore_upper` brings it back.
"""

from remesh.transparent.images.compaction import compact_image
from remesh.transparent.images.criu import dump_by_criu
from remesh.transparent.images.doctor import Finding, examine_machine
from remesh.transparent.images.dump import dump_image
from remesh.transparent.images.frozen import Frozen, freeze
from remesh.transparent.images.inspection import check_imageable
from remesh.transparent.images.kinds import (
    CHANNEL_PATH,
    INNER_PID,
    Command,
    ImageReport,
    NotImageable,
    OpenFilePolicy,
    Refusal,
    Site,
)
from remesh.transparent.images.stored import describe_image
from remesh.transparent.images.upper import Upper, restore_upper, start_upper, upper_environment

__all__ = [
    "CHANNEL_PATH",
    "INNER_PID",
    "Command",
    "Finding",
    "Frozen",
    "ImageReport",
    "NotImageable",
    "OpenFilePolicy",
    "Refusal",
    "Site",
    "Upper",
    "check_imageable",
    "compact_image",
    "describe_image",
    "dump_by_criu",
    "dump_image",
    "examine_machine",
    "freeze",
    "restore_upper",
    "start_upper",
    "upper_environment",
]
