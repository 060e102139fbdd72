"""Strategies of the format ``torch_dist``: how `save` and `load` write and read sharded data by default.

The names are those that users know; what they do is in `remesh.checkpoint.run`, the bytes in
`remesh.checkpoint.formats.torch_format`. Each method is called by every rank of the group, and can be called on its
own too: then it writes or reads the sharded data alone, as a checkpoint of native torch, which has no marker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from remesh.checkpoint.background.settling import Settling
from remesh.checkpoint.background.staging import Copies, StagingBuffers
from remesh.checkpoint.background.writers import AsyncRequest
from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError
from remesh.checkpoint.formats.directory import CONFIG_FNAME, METADATA_FNAME
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.plan.manifest import Manifest
from remesh.checkpoint.run.collective_steps import take_step
from remesh.checkpoint.run.reader import Fill, OpenCheckpoint, describe_whole, open_checkpoint, plan_fill, run_fill
from remesh.checkpoint.run.removal import remove_tensors
from remesh.checkpoint.run.writer import (
    SavePart,
    SaveUnderWay,
    agree_on_index,
    commit_native,
    dump_objects,
    part_of,
    save_under_way,
    store_entities,
    sums_of,
    write_index_of,
    write_part,
)
from remesh.checkpoint.storage import Directory, Location, location_of, store_of
from remesh.checkpoint.values.entities import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.checkpoint.values.nests import dict_list_map_outplace, nested_values
from remesh.comm.agreement import Agreements
from remesh.comm.gather import Group, group_rank
from remesh.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from remesh.dist_checkpointing.strategies.torch_faces import *  # noqa: F403 - names of this module, too

PLANS = Agreements()
"""Of the states that this process has saved, so that ranks which save the same again send no plans."""


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Writes ``torch_dist``: one data file per rank, and the index.

    ``keep_only_main_replica=False`` writes every replica; readers see one of them. Tensors whose keys start with
    ``separation_hint`` go to files of their own, so that their removal frees all their bytes. ``max_staged_bytes``
    bounds the copies of background saves on this rank: a save that finds no room waits for those before it.
    ``thread_count``, ``cached_metadata`` and ``cpu_shm_mode`` are accepted for the sake of callers and change nothing:
    a rank writes one file, plans are always remembered and always checked, and copies lie in memory that processes can
    share.
    """

    can_handle_sharded_objects = raises_everywhere = True
    _writes = (BACKEND, BACKEND_VERSION)

    def __init__(  # noqa: PLR0913 - the signature that users know
        self,
        backend: str = BACKEND,
        version: int = BACKEND_VERSION,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
        *,
        max_staged_bytes: int | None = None,
    ) -> None:
        super().__init__(backend, version)
        is_name = separation_hint is None or (separation_hint.isprintable() and not set(separation_hint) & set("/\\"))
        for is_right, found, expected in (
            (thread_count >= 1, f"thread_count is {thread_count}", "at least 1"),
            (is_name, f"separation_hint is {separation_hint!r}", "the beginning of a file name"),
        ):
            if not is_right:
                raise CheckpointingException(f"making a save strategy: {found}, expected {expected}")
        self.separation_hint = separation_hint
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.cpu_shm_mode = cpu_shm_mode
        self._staging = StagingBuffers(max_staged_bytes)
        self.cached_global_metadata: Manifest | None = None
        """Accepted from a load strategy for the sake of callers; a plan is used when all ranks know it, not before."""

    def check_can_save(self, sharded_state_dict: ShardedStateDict) -> Mapping[str, bytes]:
        """Serialise the objects, which may fail."""
        return dump_objects(self._entities_of(sharded_state_dict))

    def release_staging(self) -> None:
        """Free the memory that is kept for the copies of the next background save."""
        self._staging.release()

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory, *, process_group: Group = None
    ) -> None:
        """Write this rank's file; the first rank also the index. Blocks until all have written."""
        entities = self._entities_of(sharded_state_dict)
        under_way = save_under_way(location_of(checkpoint_dir), process_group)
        sums = store_entities(
            entities,
            under_way.lock,
            PLANS,
            process_group,
            blobs=under_way.blobs,
            with_sha256=under_way.with_sha256,
            separation_hint=self.separation_hint,
        )
        under_way.sums.update(sums)
        if under_way.is_lone:
            doing = f"saving checkpoint {under_way.lock.directory}"
            take_step(partial(commit_native, under_way.lock, process_group), process_group, doing)

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str | None = None,
        *,
        process_group: Group = None,
    ) -> AsyncRequest:
        """Copy this rank's values, and return what is left to do. Later changes of the tensors are not written."""
        directory = location_of(checkpoint_dir)
        entities = self._entities_of(sharded_state_dict)
        under_way = save_under_way(directory, process_group)

        def copy_values() -> tuple[SavePart, Copies]:
            part = part_of(entities, under_way.blobs, self.separation_hint)
            return replace(part, tensors=[]), self._staging.copy(part.tensors)

        part, copies = take_step(copy_values, process_group, f"saving checkpoint {directory}").mine
        written: Future[Sequence[Any]] = Future()

        def receive(rows: Sequence[Any]) -> None:
            written.set_result(rows)
            self._staging.give_back(copies)

        return AsyncRequest(
            write_part,
            (part, copies, under_way.lock, group_rank(process_group)),
            [_settling(written.result, under_way, process_group)],
            {"with_sha256": under_way.with_sha256},
            preload_fn=copies.wait,
            receive_fn=receive,
            total_bytes=sum(one.nbytes for one in copies.tensors) or 1,
        )

    def _entities_of(self, sharded_state_dict: ShardedStateDict) -> list[ShardedBase]:
        entities = _entities_in(sharded_state_dict)
        if self.keep_only_main_replica:
            return entities
        return [replace(entity, replica_id=0) for entity in entities]  # type: ignore[type-var]


def _settling(written: Callable[[], Sequence[Any]], under_way: SaveUnderWay, group: Group) -> Settling:
    """What writes the index of a background save, and closes its lock if that is the strategy's own."""
    lock = under_way.lock

    def agree() -> Callable[[], None]:
        agreement = agree_on_index(written, lock.directory, PLANS, group)

        def keep() -> None:
            PLANS.remember(agreement)
            under_way.sums.update(sums_of(agreement))

        settling.add_on_success(keep)
        return lambda: write_index_of(agreement, lock, group)

    settling = Settling(agree, group, f"saving checkpoint {lock.directory}")
    if under_way.is_lone:
        settling.add(partial(commit_native, lock, group))
    return settling


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """Reads ``torch_dist`` of all known writers. With ``cache_metadata`` the index of a directory is read once.

    ``checkpoint_name`` and ``stream_ckpt_dequant`` are accepted for the sake of callers: tensors are always read
    straight into those of the request.
    """

    can_handle_sharded_objects = raises_everywhere = True
    _reads = (BACKEND, BACKEND_VERSION)

    def __init__(
        self, cache_metadata: bool = False, stream_ckpt_dequant: bool = True, checkpoint_name: str | None = None
    ) -> None:
        self.cache_metadata = cache_metadata
        self.checkpoint_name = checkpoint_name
        self.stream_ckpt_dequant = stream_ckpt_dequant
        self._opened: tuple[tuple[Any, ...], OpenCheckpoint] | None = None
        self.cached_global_metadata: Manifest | None = None
        """The index of the checkpoint that was opened last."""

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Directory,
        async_strategy: str | None = None,
        *,
        process_group: Group = None,
    ) -> StateDict:
        """The nest with values: tensors filled in place, those without data new on the CPU.

        No tensor is changed on any rank until all have planned their reads without error.
        """
        directory = location_of(checkpoint_dir)
        doing = f"loading checkpoint {directory}"
        entities = _entities_in(sharded_state_dict)

        def plan() -> tuple[OpenCheckpoint, Fill]:
            checkpoint = self.open(directory)
            return checkpoint, plan_fill(checkpoint, entities)

        planned = take_step(plan, process_group, doing).mine
        read = take_step(lambda: run_fill(*planned), process_group, doing).mine
        values = {id(entity): value for entity, value in zip(entities, read, strict=True)}
        loaded: StateDict = dict_list_map_outplace(lambda leaf: values.get(id(leaf), leaf), sharded_state_dict)
        return loaded

    def for_one_load(self) -> LoadShardedStrategy:
        """One of its own for every load: the index is read once and forgotten with it."""
        made = copy.copy(self)
        made.cache_metadata, made._opened = True, None
        return made

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, metadata: Manifest | None = None
    ) -> dict[str, ShardedTensor]:
        manifest = metadata if metadata is not None else self.open(checkpoint_dir).manifest
        return {**describe_whole(manifest)}

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedTensor | ShardedObject]:
        manifest = self.open(checkpoint_dir).manifest
        objects = {name: ShardedObject.empty_from_unique_key(name) for name in manifest.objects}
        return {**self.load_tensors_metadata(checkpoint_dir, manifest), **objects}

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        """Take every tensor whose key starts with the prefix out of the index, and delete files that nothing needs."""
        self._opened = None
        remove_tensors(location_of(checkpoint_dir), key_prefix)

    def open(self, checkpoint_dir: Directory) -> OpenCheckpoint:
        """The checkpoint's index and common data. Calls no other rank."""
        directory = location_of(checkpoint_dir)
        identity = _identity(directory) if self.cache_metadata else ()
        if self._opened is None or self._opened[0] != identity or not identity:
            self._opened = (identity, open_checkpoint(directory, allow_native=True))
            self.cached_global_metadata = self._opened[1].manifest
        return self._opened[1]


def _entities_in(sharded_state_dict: ShardedStateDict) -> list[ShardedBase]:
    entities: list[ShardedBase] = []
    for leaf in nested_values(sharded_state_dict):
        if not isinstance(leaf, ShardedTensor | ShardedObject):
            raise CheckpointMismatchError(
                f"listing the entities of a sharded state dict: found a {type(leaf).__name__}, expected ShardedTensor "
                "and ShardedObject only; apply factories and take common data out first"
            )
        entities.append(leaf)
    return entities


def _identity(directory: Location) -> tuple[Any, ...]:
    paths = [directory / name for name in (METADATA_FNAME, CONFIG_FNAME)]
    return (directory, *(store_of(path).version_of(path) for path in paths))


def register_default_torch_strategies() -> None:
    """Make these strategies the default ones of the format, as they are from the start."""
    save, load = TorchDistSaveShardedStrategy(BACKEND, BACKEND_VERSION), TorchDistLoadShardedStrategy()
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, BACKEND_VERSION, save)
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, BACKEND_VERSION, load)


register_default_torch_strategies()
