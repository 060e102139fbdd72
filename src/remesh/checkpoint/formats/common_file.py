"""The file of common data, ``common.pt``: one blob with the nest of common leaves."""

from __future__ import annotations

from typing import Any, Final

from remesh.checkpoint.errors import CheckpointFormatError
from remesh.checkpoint.formats.blob import dump_object, load_object
from remesh.checkpoint.storage import Directory, location_of, store_of

COMMON_STATE_FNAME: Final = "common.pt"


def save_common(common_state_dict: dict[str, Any], checkpoint_dir: Directory) -> None:
    """Write the common data durably; called by one rank."""
    path = location_of(checkpoint_dir) / COMMON_STATE_FNAME
    store_of(path).put(path, dump_object(common_state_dict, "the common data"))


def load_common(checkpoint_dir: Directory) -> dict[str, Any]:
    """The common data of a checkpoint, tensors on the CPU."""
    path = location_of(checkpoint_dir) / COMMON_STATE_FNAME
    try:
        content = store_of(path).read(path)
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
