"""Reading each shard once in a data-parallel group, under the name that zarr's strategy for it has had."""

from __future__ import annotations

from remesh.comm.gather import Group
from remesh.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from remesh.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy

__all__ = ["TwoStageDataParallelLoadShardedStrategy"]


class TwoStageDataParallelLoadShardedStrategy(FullyParallelLoadStrategyWrapper):
    """Reads zarr, each shard on one rank of the group, which sends it to those that want it.

    ``cpu_transfer`` is accepted: shards go through what the group carries.
    """

    def __init__(self, data_parallel_group: Group, cpu_transfer: bool = True) -> None:
        super().__init__(ZarrLoadShardedStrategy(), data_parallel_group, exchange_algo="planned")
        self.cpu_transfer = cpu_transfer
