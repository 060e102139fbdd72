"""Pythons that a carried program starts, or becomes (`os.execv`): what they find of Remesh.

A program that starts itself again in its own process goes on as the program of its rank. A child is none: it has the
environment of a rank, but nobody would answer it, so its first call for process groups is refused by name.
"""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from remesh.carried.torch.hook import after_import
from remesh.foundation.settings import PROGRAM

_STARTUP: Final = str(Path(__file__).parent / "startup")
REFUSAL: Final = (
    "making process groups in a child of a rank's program: Remesh carries groups of the process that it has started "
    "for each rank; call init_process_group there, and start as many ranks as are wanted with --nproc-per-node, "
    "instead of mp.spawn or a child that trains"
)


def prepare_successors() -> None:
    """Have each Python that this one starts, or becomes, find what it is."""
    os.environ[PROGRAM.name] = str(os.getpid())
    places = [_STARTUP, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, places)))


class Lineage(enum.Enum):
    """What a Python is to the program of a rank."""

    NONE = "none"  # nothing, or the program as it was started
    PROGRAM = "program"  # which has started itself again
    CHILD = "child"


def find_lineage() -> Lineage:
    """What this Python is."""
    if not PROGRAM.read():
        return Lineage.NONE
    return Lineage.PROGRAM if PROGRAM.read() == str(os.getpid()) else Lineage.CHILD


def refuse_groups() -> None:
    """Refuse the rendezvous of this process, once it has imported torch."""
    after_import("torch.distributed", _refuse_rendezvous)


def _refuse_rendezvous(_: ModuleType) -> None:
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers["env"] = handlers["tcp"] = refuse


def refuse(*_: object, **__: object) -> NoReturn:
    """Refuse the rendezvous of a child."""
    raise NotImplementedError(REFUSAL)
