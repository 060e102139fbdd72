"""Reader of another program's ``torch.save`` files: plain values, with stand-ins for its own objects."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats.data_file import SAFE_GLOBALS, reason_of
from remesh.checkpoint.formats.inert_objects import stand_ins_for


def read_torch_file(path: Path, program: str, own: Sequence[str]) -> dict[str, Any]:
    """The dict in a file, on the CPU; classes whose names begin with one of ``own`` become stand-ins.

    Raises `CheckpointFormatError` for other classes, for a file that was hurt, and for one that holds no dict.
    """
    try:
        _check_records(path)
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *stand_ins_for(str(path), own)]):
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as raised:  # what a file makes the readers raise is anything
        if isinstance(raised, OSError) and raised.errno != errno.EINVAL:  # that is torch's, of a file cut short
            raise
        raise CheckpointFormatError(
            "bad-file",
            f"reading {path}: expected a whole file of {program} that holds only classes of that program, found: "
            f"{reason_of(raised)}; do not load it",
        ) from raised
    if not isinstance(held, dict):
        raise CheckpointFormatError(
            "bad-file", f"reading {path}: expected a dict of {program}, found a {type(held).__name__}; correct the path"
        )
    return held


def _check_records(path: Path) -> None:
    """Raise if a record is not what was written: ``torch.load`` does not compare the checksums of ``torch.save``."""
    if zipfile.is_zipfile(path):  # a file of an early torch is none, and has no checksums
        with zipfile.ZipFile(path) as archive:
            if hurt := archive.testzip():
                raise zipfile.BadZipFile(f"record {hurt!r} with another checksum than it was written with")
