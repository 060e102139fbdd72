"""The load strategy for zarr under the name it has had; there is one way to read zarr here, and this is it."""

from __future__ import annotations

from remesh.dist_checkpointing.mapping import ShardedStateDict, StateDict
from remesh.dist_checkpointing.storage import Directory
from remesh.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy
from remesh.reshard.running.exchange import Group

__all__ = ["TensorStoreLoadShardedStrategy"]


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Reads zarr. ``load_directly_on_device`` is accepted: tensors of a request are always filled in place."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str | None = None,
        *,
        process_group: Group = None,
    ) -> StateDict:
        return super().load(sharded_state_dict, checkpoint_dir, async_strategy, process_group=process_group)
