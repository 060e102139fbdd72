"""Is this directory a checkpoint, and of which format? The marker file ``metadata.json``.

The marker is written last, so its presence means that everything else is there: it is the commit of a save.
It holds exactly four fields, because readers of the time refuse any further one; newer writers leave out the
two that name the common backend.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from remesh.dist_checkpointing.errors import CheckpointFormatError, CheckpointingException

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


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory holds a committed checkpoint of this package's formats."""
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: str | os.PathLike[str] | None) -> CheckpointingConfig | None:
    """The marker of a checkpoint, or None when there is none. Fields of later versions are ignored."""
    if not checkpoint_dir:
        return None
    path = Path(checkpoint_dir) / CONFIG_FNAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: found[field.name] for field in fields(CheckpointingConfig) if field.name in found}
        config = CheckpointingConfig(**known)
    except (ValueError, TypeError) as raised:
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


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the marker in one step, durably: after a crash it is there in full or not at all.

    This is the commit of a save: call it last, from one rank, when all else has reached the disk.
    """
    directory = Path(checkpoint_dir)
    write_durably(directory / CONFIG_FNAME, json.dumps(asdict(config)).encode())


def write_durably(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content`` in one step that survives a crash: temporary file, fsync, rename, fsync."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Let the content of a file that others wrote reach the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Let the names in a directory reach the disk; without it a rename may be lost in a crash."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
