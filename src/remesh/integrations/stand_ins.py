"""What do files of ``torch.save`` hold that another program wrote? Plain values, and stand-ins of its own objects.

Read by ``torch.load(weights_only=True)``. Classes under the names that the caller gives are not imported: a `StandIn`
is made in their place, which runs no code of theirs. Every other class is refused.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remesh.checkpoint.errors import CheckpointFormatError
from remesh.checkpoint.formats.data_file import SAFE_GLOBALS, reason_of


class StandIn:
    """Stands for an object of a class of another program."""

    values: tuple[Any, ...]
    """What it was made of; for a member of an enumeration its value."""

    def __new__(cls, *values: Any) -> StandIn:
        made = object.__new__(cls)
        made.values = values
        return made

    def __setstate__(self, state: Any) -> None:
        del state


def read_torch_file(path: Path, program: str, own: Sequence[str]) -> dict[str, Any]:
    """The dict in a file, on the CPU; ``own`` are the beginnings of names of classes that become stand-ins.

    Raises `CheckpointFormatError` for other classes, and for what is no dict.
    """
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins: list[Any] = [(StandIn, name) for name in found if name.startswith(tuple(own))]
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *stand_ins]):
            held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as raised:
        raise CheckpointFormatError(
            "bad-file",
            f"reading {path}: expected a file of {program} that holds only classes of that program, found: "
            f"{reason_of(raised)}; do not load it",
        ) from raised
    if not isinstance(held, dict):
        raise CheckpointFormatError(
            "bad-file", f"reading {path}: expected a dict of {program}, found a {type(held).__name__}; correct the path"
        )
    return held


def without_stand_ins(value: Any) -> Any:
    """The same, without what a stand-in stands for."""
    if isinstance(value, dict):
        return {key: without_stand_ins(one) for key, one in value.items() if not isinstance(one, StandIn)}
    if isinstance(value, Namespace):
        return Namespace(**without_stand_ins(vars(value)))
    if isinstance(value, (list, tuple)):
        kept = [without_stand_ins(one) for one in value if not isinstance(one, StandIn)]
        return tuple(kept) if isinstance(value, tuple) else kept
    return value
