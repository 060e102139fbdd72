"""Process images: a running process with its descendants, written to a folder and brought back with the same ids,
memory and open files.

x86-64 Linux only. `start_upper` starts a process so that it can be imaged at any instruction; `check_imageable` says
what in a process stands against it; `dump_image` writes it; `restore_upper` brings it back.

Names are resolved at first use: the init of a process, which is started at each restore, needs few of these modules.
"""

from typing import TYPE_CHECKING, Any

from remesh.first_use import attribute_at_home

if TYPE_CHECKING:
    from remesh.images.ahead import remember_image, share_hashes, start_hashing_ahead
    from remesh.images.compaction import compact_image
    from remesh.images.criu import dump_by_criu
    from remesh.images.doctor import Finding, examine_machine
    from remesh.images.dump import dump_image
    from remesh.images.frozen import Frozen, freeze
    from remesh.images.inspection import check_imageable
    from remesh.images.kinds import (
        CHANNEL_PATH,
        INNER_PID,
        SHARED_PATH,
        Command,
        ImageRefusal,
        ImageReport,
        NotImageable,
        OpenFilePolicy,
        Site,
    )
    from remesh.images.starter import Starter
    from remesh.images.stored import describe_image
    from remesh.images.tree import tree_of
    from remesh.images.upper import Upper, restore_upper, start_upper

__all__ = [
    "CHANNEL_PATH",
    "INNER_PID",
    "SHARED_PATH",
    "Command",
    "Finding",
    "Frozen",
    "ImageRefusal",
    "ImageReport",
    "NotImageable",
    "OpenFilePolicy",
    "Site",
    "Starter",
    "Upper",
    "check_imageable",
    "compact_image",
    "describe_image",
    "dump_by_criu",
    "dump_image",
    "examine_machine",
    "freeze",
    "remember_image",
    "restore_upper",
    "share_hashes",
    "start_hashing_ahead",
    "start_upper",
    "tree_of",
]

_HOMES = {
    "CHANNEL_PATH": "remesh.images.kinds",
    "Command": "remesh.images.kinds",
    "Finding": "remesh.images.doctor",
    "Frozen": "remesh.images.frozen",
    "INNER_PID": "remesh.images.kinds",
    "ImageReport": "remesh.images.kinds",
    "NotImageable": "remesh.images.kinds",
    "OpenFilePolicy": "remesh.images.kinds",
    "ImageRefusal": "remesh.images.kinds",
    "SHARED_PATH": "remesh.images.kinds",
    "Site": "remesh.images.kinds",
    "Starter": "remesh.images.starter",
    "Upper": "remesh.images.upper",
    "check_imageable": "remesh.images.inspection",
    "compact_image": "remesh.images.compaction",
    "describe_image": "remesh.images.stored",
    "dump_by_criu": "remesh.images.criu",
    "dump_image": "remesh.images.dump",
    "examine_machine": "remesh.images.doctor",
    "freeze": "remesh.images.frozen",
    "remember_image": "remesh.images.ahead",
    "restore_upper": "remesh.images.upper",
    "share_hashes": "remesh.images.ahead",
    "start_hashing_ahead": "remesh.images.ahead",
    "start_upper": "remesh.images.upper",
    "tree_of": "remesh.images.tree",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        return attribute_at_home(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
