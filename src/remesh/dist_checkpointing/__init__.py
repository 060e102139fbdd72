"""Checkpoints that know how each local tensor sits in the global one, so any number of ranks can load them.

The names, module paths and on-disk formats are those that users of Megatron Core know: change the import, nothing
else. `remesh.save` and `remesh.load` do the same for plain state dicts of DTensors (module ``plain``).
"""

from remesh.foundation.first_use import import_home

import_home("torch", "importing remesh.dist_checkpointing")  # where it is missing, the error names the extra

from remesh.checkpoint.formats.directory import check_is_distributed_checkpoint  # noqa: E402
from remesh.checkpoint.values.entities import (  # noqa: E402
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from remesh.dist_checkpointing import (  # noqa: E402, F401 - attributes of the package, as in Megatron Core
    core,
    dict_utils,
    exchange_utils,
    gpt_checkpoint_interop,
    mapping,
    optimizer,
    serialization,
    state_dict_utils,
    strategies,
    tensor_aware_state_dict,
    utils,
    validation,
)
from remesh.dist_checkpointing.serialization import (  # noqa: E402
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]
