"""Is this directory a checkpoint, and of which format? The marker file ``metadata.json``.

The marker is written last, so its presence means that everything else is there: it is the commit of a save.
It holds exactly four fields, because readers of the time refuse any further one; newer writers leave out the
two that name the common backend.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from remesh.checkpoint.errors import CheckpointFormatError, CheckpointingException
from remesh.checkpoint.storage import Directory, location_of, store_of

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]

CONFIG_FNAME = "metadata.json"


@dataclass
class CheckpointingConfig:
    """Content of the marker: which format the tensors and the common data are in."""

    sharded_backend: str
    """Format of the sharded tensors, ``"torch_dist"``."""
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    """Format of the common data; ``"torch"`` is the file ``common.pt``."""
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: Directory) -> bool:
    """Whether the directory holds a committed checkpoint of this package's formats."""
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: Directory | None) -> CheckpointingConfig | None:
    """The marker of a checkpoint, or None when there is none. Fields of later versions are ignored."""
    if not checkpoint_dir:
        return None
    path = location_of(checkpoint_dir) / CONFIG_FNAME
    try:
        content = store_of(path).read(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    try:
        found = json.loads(content)
        known = {field.name: found[field.name] for field in fields(CheckpointingConfig) if field.name in found}
        config = CheckpointingConfig(**known)
    except (ValueError, TypeError, RecursionError) as raised:
        raise CheckpointFormatError(
            "bad-config",
            f"reading the marker {path}: expected a JSON object with the field sharded_backend, found: {raised}; "
            "the checkpoint is damaged, use another one",
        ) from raised
    if not isinstance(config.sharded_backend, str) or not isinstance(config.sharded_backend_version, int):
        raise CheckpointFormatError(
            "bad-config",
            f"reading the marker {path}: expected a backend name and a version number, found "
            f"{config.sharded_backend!r} and {config.sharded_backend_version!r}; the checkpoint is damaged",
        )
    return config


def save_config(config: CheckpointingConfig, checkpoint_dir: Directory) -> None:
    """Write the marker in one step, durably: after a crash it is there in full or not at all.

    This is the commit of a save: call it last, from one rank, when all else has reached the disk.
    """
    path = location_of(checkpoint_dir) / CONFIG_FNAME
    store_of(path).put(path, json.dumps(asdict(config)).encode())
