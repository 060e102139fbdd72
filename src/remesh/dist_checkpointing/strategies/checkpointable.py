"""How does native torch save and load a ShardedTensor? By the protocol of DCP for any kind of sharding.

dcp.save({"w": CheckpointableShardedTensor.from_sh_ten(shard)}, checkpoint_id=path)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import ShardedTensor, is_main_replica


class LocalShardsContainer(torch.Tensor):
    """All shards of one key on this rank. Native torch writes its main replicas, and fills all when it loads."""

    _shards: list[ShardedTensor]

    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor | ShardedTensor]) -> LocalShardsContainer:
        shards: list[ShardedTensor] = []
        for one in local_shards:
            shards += [one] if isinstance(one, ShardedTensor) else one._shards
        if not shards or len({(one.key, one.global_shape, one.dtype) for one in shards}) != 1:
            raise CheckpointMismatchError(
                f"putting shards together: expected one or more of one tensor, found {[one.key for one in shards]}"
            )
        made = torch.empty(0, dtype=shards[0].dtype).as_subclass(cls)
        made._shards = shards
        return made

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self._shards[0].global_shape)
        return shape if dim is None else shape[dim]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._shards[0].dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, one.global_offset, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk_of(one), properties, self.size()),
            )
            for number, one in enumerate(self._shards)
            if is_main_replica(one.replica_id)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk_of(one) for one in self._shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for one in self._shards:
            if index.offset is None or tuple(index.offset) == one.global_offset:
                return one.data_in_box()
        raise CheckpointMismatchError(
            f"looking up a shard of {index.fqn!r}: found offset {index.offset}, expected one of "
            f"{[one.global_offset for one in self._shards]}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._shards!r})"


class CheckpointableShardedTensor(LocalShardsContainer):
    """One shard."""

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """The shard as native torch wants it; it shares its data."""
        made = cls([sh_ten])
        assert isinstance(made, cls)
        return made


def _chunk_of(shard: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.global_offset), torch.Size(shard.box_shape))
