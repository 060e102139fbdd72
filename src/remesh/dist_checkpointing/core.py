"""Names of `remesh.checkpoint.formats.directory` under the module that users of Megatron Core import."""

from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.formats.directory import (
    CONFIG_FNAME,
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]
