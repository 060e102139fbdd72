"""Subclasses of Tensor by which native torch saves and loads a ShardedTensor: DCP's protocol for any kind of sharding.

dcp.save({"w": CheckpointableShardedTensor.from_sh_ten(shard)}, checkpoint_id=path)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import ShardedTensor, is_main_replica


class LocalShardsContainer(torch.Tensor):
    """All shards of one key on this rank. Native torch writes its main replicas, and fills all when it loads."""

    _local_shards: list[CheckpointableShardedTensor]

    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor | ShardedTensor]) -> LocalShardsContainer:
        make = CheckpointableShardedTensor.from_sh_ten
        held = [make(one) if isinstance(one, ShardedTensor) else one for one in local_shards]
        shards = [one._sh_ten for one in held]
        if not shards or len({(one.key, one.global_shape, one.dtype) for one in shards}) != 1:
            raise CheckpointMismatchError(
                f"putting shards together: expected one or more of one tensor, found {[one.key for one in shards]}"
            )
        made = torch.empty(0, dtype=shards[0].dtype, device="cpu").as_subclass(cls)
        made._local_shards = held
        return made

    @property
    def _shards(self) -> list[ShardedTensor]:
        return [one._sh_ten for one in self._local_shards]

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self._shards[0].global_shape)
        return shape if dim is None else shape[dim]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        held = enumerate(self._local_shards)
        return [item for number, one in held for item in one.__create_write_items__(fqn, one, number)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for one in self._local_shards for chunk in one.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for one in self._local_shards:
            if index.offset is None or tuple(index.offset) == one._sh_ten.global_offset:
                return one.__get_tensor_shard__(index)
        raise CheckpointMismatchError(
            f"looking up a shard of {index.fqn!r}: found offset {index.offset}, expected one of "
            f"{[one.global_offset for one in self._shards]}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._shards!r})"


class CheckpointableShardedTensor(LocalShardsContainer):
    """One shard."""

    _sh_ten: ShardedTensor

    def __new__(cls, data: torch.Tensor | None, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        made = torch.empty(0, dtype=sh_ten.dtype, device="cpu").as_subclass(cls)
        made._sh_ten = sh_ten if data is sh_ten.data else replace(sh_ten, data=data)
        return made

    @property
    def _local_shards(self) -> list[CheckpointableShardedTensor]:  # type: ignore[override]
        return [self]

    def __create_write_items__(self, fqn: str, value: object, index: int | None = 0) -> list[WriteItem]:
        one = self._sh_ten
        if not is_main_replica(one.replica_id):
            return []
        written = TensorWriteData(_chunk_of(one), TensorProperties(dtype=one.dtype), self.size())
        return [WriteItem(MetadataIndex(fqn, one.global_offset, index), WriteItemType.SHARD, tensor_data=written)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk_of(self._sh_ten)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._sh_ten.data_in_box()

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """The shard as native torch wants it; it shares its data."""
        return cls(sh_ten.data, sh_ten)


def _chunk_of(shard: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.global_offset), torch.Size(shard.box_shape))
