"""Process images: a running process, written to a folder and brought back with the same ids, memory and open files.

x86-64 Linux only. `start_upper` starts a process so that it can be imaged at any instruction; `check_imageable` says
what in a process stands against it; `dump_image` writes it; `restore_upper` brings it back.

Names are resolved at first use: the init of a process, which is started at each restore, needs few of these modules.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remesh.images.compaction import compact_image
    from remesh.images.criu import dump_by_criu
    from remesh.images.doctor import Finding, examine_machine
    from remesh.images.dump import dump_image
    from remesh.images.frozen import Frozen, freeze
    from remesh.images.inspection import check_imageable
    from remesh.images.kinds import (
        CHANNEL_PATH,
        INNER_PID,
        Command,
        ImageReport,
        NotImageable,
        OpenFilePolicy,
        Refusal,
        Site,
    )
    from remesh.images.stored import describe_image
    from remesh.images.upper import Upper, restore_upper, start_upper, upper_environment

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

_HOMES = {
    "CHANNEL_PATH": "kinds",
    "Command": "kinds",
    "Finding": "doctor",
    "Frozen": "frozen",
    "INNER_PID": "kinds",
    "ImageReport": "kinds",
    "NotImageable": "kinds",
    "OpenFilePolicy": "kinds",
    "Refusal": "kinds",
    "Site": "kinds",
    "Upper": "upper",
    "check_imageable": "inspection",
    "compact_image": "compaction",
    "describe_image": "stored",
    "dump_by_criu": "criu",
    "dump_image": "dump",
    "examine_machine": "doctor",
    "freeze": "frozen",
    "restore_upper": "upper",
    "start_upper": "upper",
    "upper_environment": "upper",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
