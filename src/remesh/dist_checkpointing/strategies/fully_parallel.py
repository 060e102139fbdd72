"""Strategies that share the work of another one among the ranks of a group that hold replicas.

Without them the main replica writes everything that is replicated, and every rank reads all that it wants. With them

    save   each shard is written by one of the ranks that hold it, so that all write about as many bytes; no data moves
    load   each shard is read by one of the ranks that want it, and goes from there to the others

The format stays that of the wrapped strategy, so any pairing of wrapped and plain ones works. Which rank does what is
decided in `remesh.dist_checkpointing.exchange_utils`, from descriptions alone. Every method is called by every rank
of the group. Objects are not shared out: each rank reads those it wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from remesh.checkpoint.background.writers import AsyncRequest
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.storage import Directory
from remesh.checkpoint.values.entities import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.checkpoint.values.nests import dict_list_map_inplace, dict_list_map_outplace, nested_values
from remesh.comm.agreement import Agreements
from remesh.comm.gather import Group, group_rank, group_size
from remesh.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    Shards,
    Tensors,
    check_exchange_algo,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
)
from remesh.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    call_on_all,
)
from remesh.dist_checkpointing.utils import _sharded_tensor_shard_id as _sharded_tensor_shard_id

_Wrapped = TypeVar("_Wrapped", SaveShardedStrategy, LoadShardedStrategy)


class _Sharing(Generic[_Wrapped]):
    """What both wrappers have: the wrapped strategy, the group, and the distribution of the work among its ranks.

    With ``do_cache_distribution`` the distribution is computed anew only when the shards of a rank have changed, which
    one short gather shows. ``pg_cache_path`` and ``pg_cache_create`` are accepted and change nothing: where nothing is
    remembered, one gather makes the distribution.
    """

    base_strategy: _Wrapped
    parallelization_group: Group
    cached_distribution: ShardDistribution | None = None
    """The one used last, with ``do_cache_distribution``."""

    def _share(self, strategy: _Wrapped, group: Group, do_cache_distribution: bool) -> None:
        self.base_strategy = strategy
        self.parallelization_group = group
        self.do_cache_distribution = do_cache_distribution
        self.can_handle_sharded_objects = strategy.can_handle_sharded_objects
        self.raises_everywhere = strategy.raises_everywhere
        self._distributions = Agreements() if do_cache_distribution else None

    @property
    def cached_global_metadata(self) -> Any:
        """The cached metadata of the wrapped strategy."""
        return getattr(self.base_strategy, "cached_global_metadata", None)

    @cached_global_metadata.setter
    def cached_global_metadata(self, metadata: Any) -> None:
        self.base_strategy.cached_global_metadata = metadata  # type: ignore[attr-defined]

    def _distribution(self, sharded_state_dict: ShardedStateDict, *, ignore_groups: bool) -> ShardDistribution | None:
        distribution = determine_main_replica_uniform_distribution(
            sharded_state_dict, self.parallelization_group, ignore_groups, plans=self._distributions
        )
        if self.do_cache_distribution:
            self.cached_distribution = distribution
        return distribution


class FullyParallelSaveStrategyWrapper(_Sharing[SaveShardedStrategy], AsyncSaveShardedStrategy):
    """Saves with ``strategy``, after sharing out the writing of replicas among ``parallelization_group``."""

    def __init__(  # noqa: PLR0913 - the signature that users know
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        backend: str | None = None,
        version: int | None = None,
        validate_access_integrity: bool = True,
        pg_cache_path: Directory | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        super().__init__(backend or strategy.backend, version or strategy.version)
        if (self.backend, self.version) != (strategy.backend, strategy.version):
            raise CheckpointingException(
                f"wrapping {strategy}: found backend {backend!r} version {version}, expected those of the wrapped "
                "strategy, since the wrapper does not change the format"
            )
        self._share(strategy, parallelization_group, do_cache_distribution)
        self.validate_access_integrity = validate_access_integrity

    def check_can_save(self, sharded_state_dict: ShardedStateDict) -> Mapping[str, bytes]:
        return self.base_strategy.check_can_save(sharded_state_dict)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory, **options: Any) -> None:
        """Share out the writing, then save. Marks in ``replica_id`` of the caller's tensors which rank writes."""
        self.apply_saving_parallelization(sharded_state_dict)
        self.base_strategy.save(sharded_state_dict, checkpoint_dir, **options)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory, *args: Any, **options: Any
    ) -> AsyncRequest:
        """Share out the writing, then let the wrapped strategy begin a save in the background."""
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async base strategy {self.base_strategy}; save synchronously"
            )
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir, *args, **options)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Give each shard's chosen writer replica 0 and the other holders replica 1, in place."""
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict,
            self.parallelization_group,
            self._distribution(sharded_state_dict, ignore_groups=False),
        )


class FullyParallelLoadStrategyWrapper(_Sharing[LoadShardedStrategy], LoadShardedStrategy):
    """Loads with ``strategy``, each shard on one rank of ``parallelization_group``, then exchanges them.

    The exchange sends to each rank what it needs and no more; ``exchange_algo`` takes the names that users know for it.
    """

    def __init__(  # noqa: PLR0913 - the signature that users know
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Group = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        per_rank_object_load: bool = True,
        pg_cache_path: Directory | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        super().__init__()
        check_exchange_algo(exchange_algo)
        self._share(strategy, parallelization_group, do_cache_distribution)
        self.exchange_algo = exchange_algo
        self.per_rank_object_load = per_rank_object_load

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory, *args: Any, **options: Any
    ) -> StateDict:
        """The nest with values, as the wrapped strategy gives it; every shard is read once in the group."""
        if group_size(self.parallelization_group) <= 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir, *args, **options)
        distribution = self.apply_loading_parallelization(sharded_state_dict)
        assert distribution is not None
        rank = group_rank(self.parallelization_group)
        readers = distribution.main_rank_for_shard
        mine: list[ShardedBase] = []
        unloaded: Shards = {}
        for one in nested_values(sharded_state_dict):
            shard = _sharded_tensor_shard_id(one) if isinstance(one, ShardedTensor) else None
            if shard is None or readers[shard] == rank:
                mine.append(one)
            else:
                unloaded.setdefault(shard, one)
        read: ShardedStateDict = {str(number): one for number, one in enumerate(mine)}
        loaded = call_on_all(
            self.base_strategy,
            lambda: self.base_strategy.load(read, checkpoint_dir, *args, **options),
            self.parallelization_group,
            f"loading checkpoint {checkpoint_dir}",
        )
        values = {id(one): loaded[number] for number, one in read.items()}
        tensors = {_sharded_tensor_shard_id(one): values[id(one)] for one in mine if isinstance(one, ShardedTensor)}
        everything = exchange_by_distribution(
            tensors, unloaded, distribution, self.parallelization_group, self.exchange_algo
        )
        values |= _values_of_others(sharded_state_dict, everything, values)
        result: StateDict = dict_list_map_outplace(lambda leaf: values.get(id(leaf), leaf), sharded_state_dict)
        return result

    def apply_loading_parallelization(self, sharded_state_dict: ShardedStateDict) -> ShardDistribution | None:
        """The distribution of the reading among the group; None for a group of one."""
        return self._distribution(sharded_state_dict, ignore_groups=True)

    def load_tensors_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedTensor | ShardedObject]:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Give each shard's chosen writer replica 0 and the other holders in the group replica 1, in place.

    Shards that the distribution does not deal with, because their main replica is in another group, get replica 1.
    """
    if precomputed_distribution is None or group_size(parallelization_group) <= 1:
        return
    rank = group_rank(parallelization_group)
    seen = set()

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            shard = _sharded_tensor_shard_id(leaf)
            is_writer = precomputed_distribution.main_rank_for_shard.get(shard) == rank and shard not in seen
            seen.add(shard)
            leaf.replica_id = 0 if is_writer else 1
        return leaf

    dict_list_map_inplace(mark, sharded_state_dict)


def _values_of_others(nest: ShardedStateDict, received: Tensors, known: Mapping[int, Any]) -> dict[int, Any]:
    """The value of each tensor that is not known yet, by its id. Every place of a shard gets its own tensor filled."""
    values: dict[int, Any] = {}
    for one in nested_values(nest):
        if isinstance(one, ShardedTensor) and id(one) not in known:
            found = received[_sharded_tensor_shard_id(one)]
            is_apart = one.data is not None and one.data.data_ptr() != found.data_ptr()
            values[id(one)] = one.data.detach().copy_(found) if is_apart and one.data is not None else found
    return values
