"""The file of common data, ``common.pt``: one blob with the nest of common leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from remesh.dist_checkpointing.core import write_durably
from remesh.dist_checkpointing.errors import CheckpointFormatError
from remesh.dist_checkpointing.strategies.blob import dump_object, load_object

COMMON_STATE_FNAME = "common.pt"


def save_common(common: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the common data durably; called by one rank."""
    write_durably(Path(checkpoint_dir) / COMMON_STATE_FNAME, dump_object(common, "the common data"))


def load_common(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The common data of a checkpoint, tensors on the CPU."""
    path = Path(checkpoint_dir) / COMMON_STATE_FNAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as raised:
        raise CheckpointFormatError(
            "missing-common",
            f"loading common data: {path} does not exist, expected it beside the other files; the checkpoint is "
            "incomplete, use another one",
        ) from raised
    common = load_object(content, str(path))
    if not isinstance(common, dict):
        raise CheckpointFormatError(
            "bad-common", f"loading common data: {path} holds a {type(common).__name__}, expected a dict"
        )
    return common
