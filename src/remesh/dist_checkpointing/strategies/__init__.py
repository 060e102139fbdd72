"""Strategies: objects that define how sharded data is written and read. Modules are attributes, as in Megatron Core."""

from remesh.dist_checkpointing.strategies import (  # noqa: F401 - attributes; and some register themselves
    async_utils,
    base,
    cached_metadata_filesystem_reader,
    checkpointable,
    common,
    filesystem_async,
    fully_parallel,
    nvrx,
    state_dict_saver,
    tensorstore,
    torch,
    zarr,
)
