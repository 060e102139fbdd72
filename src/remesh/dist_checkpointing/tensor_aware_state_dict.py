"""A sharded state dict that can be emptied of its tensors and filled again, for checkpoints in the memory of nodes.

The tensors can be taken out (the dict is *hollow* then), sent or kept elsewhere, and put back; what remains is small.
With ``algo="fully_parallel"`` each replicated shard is kept by one rank of the group, as in a fully parallel save, and
comes back to the others by the exchange of a fully parallel load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError
from remesh.checkpoint.values.description_checks import Mismatch
from remesh.checkpoint.values.entities import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.checkpoint.values.state_split import take_apart
from remesh.comm.gather import Group, gather_from, group_rank
from remesh.device.streams import wait_for_devices
from remesh.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
)
from remesh.dist_checkpointing.utils import _sharded_tensor_shard_id
from remesh.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    find_and_report,
    parse_strict_flag,
    validate_sharding_integrity,
)

_ALGOS = ("fully_parallel", "atomic")


class MCoreTensorAwareStateDict:
    """The entities and the common data of one rank. Every rank of a group has one and makes the same calls on it."""

    def __init__(self, common: StateDict, entities: list[ShardedBase], distribution: ShardDistribution | None) -> None:
        self.common = common
        self._entities = entities
        self._distribution = distribution
        self._is_hollow = False

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: Group = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | None]:
        """The state taken apart, and what to pass as ``cached_metadata`` for the next one of the same form."""
        _check_algo(algo)
        apart = take_apart(sharded_state_dict)
        entities = apart.entities
        distribution = cached_metadata
        if algo == "fully_parallel" and distribution is None:
            tensors = {str(at): one for at, one in enumerate(entities)}
            distribution = determine_main_replica_uniform_distribution(
                tensors, parallelization_group, ignore_groups=True
            )
        if algo == "fully_parallel" and distribution is not None:
            rank, chosen = group_rank(parallelization_group), distribution.main_rank_for_shard
            entities = [
                one
                for one in entities
                if not isinstance(one, ShardedTensor) or chosen[_sharded_tensor_shard_id(one)] == rank
            ]
        return cls(apart.common, entities, distribution), distribution

    def to_state_dict(  # noqa: PLR0913 - the signature that users know
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: Group = None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> Any:
        """The state dict that the request describes, its tensors filled in place; with keys that differ, if asked."""
        _check_algo(algo)
        self._check_has_tensors("making a state dict")
        apart, mode, doing = take_apart(sharded_state_dict), parse_strict_flag(strict), "making a state dict"
        if validate_access_integrity:
            validate_sharding_integrity(determine_global_metadata(apart.sharded(), parallelization_group)[1])
        found = Mismatch()
        if StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
            mine = [[one.key for one in each] for each in (self._entities, apart.entities)]
            gathered = gather_from(lambda: mine, parallelization_group, doing)
            held, asked = ({key for each in gathered for key in each[which]} for which in (0, 1))
            found = find_and_report(mode, held, set(mine[1]), asked, parallelization_group, doing)
        kept = [one for one in apart.entities if one.key not in found.absent]
        result = apart.put_together(self.common, self._fill(kept, algo, exchange_algo, parallelization_group))
        if return_mismatch_keys or StrictHandling.requires_returning_mismatch_keys(mode):
            return result, found.missing, found.unexpected
        return result

    def _fill(self, wanted: list[ShardedBase], algo: str, exchange_algo: str, group: Group) -> dict[int, Any]:
        held = {_sharded_tensor_shard_id(one): one.data for one in self._entities if isinstance(one, ShardedTensor)}
        objects = {one.unique_key: one.data for one in self._entities if isinstance(one, ShardedObject)}
        have: dict[Any, torch.Tensor] = {shard: data for shard, data in held.items() if data is not None}
        asked = {_sharded_tensor_shard_id(one): one for one in wanted if isinstance(one, ShardedTensor)}
        if algo == "fully_parallel" and self._distribution is not None:
            lacking = {shard: one for shard, one in asked.items() if shard not in have}
            have = exchange_by_distribution(have, lacking, self._distribution, group, exchange_algo)
        filled: dict[int, Any] = {}
        for one in wanted:
            name: Any = one.unique_key if isinstance(one, ShardedObject) else None
            if isinstance(one, ShardedTensor):
                name = _sharded_tensor_shard_id(one)
                if name in have:
                    filled[id(one)] = have[name] if one.data is None else one.data.detach().copy_(have[name])
            elif name in objects:
                filled[id(one)] = objects[name]
            if id(one) not in filled:
                raise CheckpointMismatchError(
                    f"making a state dict: {name!r} is not among the shards kept in memory, expected the sharding "
                    "that was saved; for another sharding load a checkpoint from storage"
                )
        return filled

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out."""
        return self._is_hollow

    @property
    def common_state_dict(self) -> StateDict:
        """The common data."""
        return self.common

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, in an order that stays."""
        self._check_has_tensors("listing the tensors of a state dict")
        return [one.data for one in self._entities if isinstance(one, ShardedTensor) and one.data is not None]

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take all tensors out; the dict is hollow then."""
        taken = list(self.tensors)
        for one in self._entities:
            if isinstance(one, ShardedTensor):
                one.data = None
        self._is_hollow = True
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into the places from which they were taken."""
        self._check_is_hollow()
        places = [one for one in self._entities if isinstance(one, ShardedTensor)]
        for place, data in zip(places, tensor_data, strict=True):
            place.data = data
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put new, empty tensors in the places from which they were taken."""
        self._check_is_hollow()
        for one in self._entities:
            if isinstance(one, ShardedTensor):
                one.init_data("cpu")
        self._is_hollow = False

    def _check_has_tensors(self, doing: str) -> None:
        if self._is_hollow:
            raise CheckpointMismatchError(f"{doing}: its tensors were taken out; insert them first")

    def _check_is_hollow(self) -> None:
        if not self._is_hollow:
            raise CheckpointMismatchError("putting tensors into a state dict: it has its own; take them out first")

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU, which are there when this returns.

        With ``non_blocking`` all copies are queued before the first is waited for.
        """
        devices: set[torch.device] = set()

        def copy(data: torch.Tensor) -> torch.Tensor:
            devices.add(data.device)
            return data.detach().to("cpu", copy=True, non_blocking=non_blocking)

        self._replace(copy)
        if non_blocking:  # what torch has only queued may be read, or saved, by now
            wait_for_devices(devices)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Bring the tensors to the GPU in use; without one they stay."""
        if torch.cuda.is_available():
            self._replace(lambda data: data.to(torch.cuda.current_device(), non_blocking=non_blocking))

    def _replace(self, act: Any) -> None:
        self._check_has_tensors("moving the tensors of a state dict")
        for one in self._entities:
            if isinstance(one, ShardedTensor) and one.data is not None:
                one.data = act(one.data)


def _check_algo(algo: str) -> None:
    if algo not in _ALGOS:
        raise CheckpointingException(f"taking a state dict apart: algo is {algo!r}, expected one of {_ALGOS}")
