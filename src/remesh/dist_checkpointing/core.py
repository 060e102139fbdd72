"""Names of `remesh.checkpoint.formats.directory` under the module that users of Megatron Core import."""

from remesh.checkpoint.checkpoint_errors import CheckpointingException as CheckpointingException
from remesh.checkpoint.formats.directory import (
    CONFIG_FNAME as CONFIG_FNAME,
    CheckpointingConfig as CheckpointingConfig,
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
    maybe_load_config as maybe_load_config,
    save_config as save_config,
)
