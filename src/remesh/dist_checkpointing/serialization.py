"""Entry points for saving and loading sharded state dicts, with Megatron Core's signatures.

All functions accept a path for the directory, or a URL of a store. Those that are not marked otherwise
do not communicate. What saves and loads is `remesh.checkpoint.run`, as for plain states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from remesh.checkpoint.background.settling import Settling
from remesh.checkpoint.background.writers import AsyncRequest
from remesh.checkpoint.checkpoint_errors import CheckpointingException, as_checkpoint_error
from remesh.checkpoint.formats.directory import CheckpointingConfig, load_common, maybe_load_config
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.run.collective_steps import take_first_step, take_step
from remesh.checkpoint.run.reader import READABLE, check_is_one, read_common
from remesh.checkpoint.run.writer import (
    AfterCommon,
    Begun,
    RankState,
    begin_save,
    commit_alone,
    commit_save,
    outline_in_pieces,
    writing_in,
)
from remesh.checkpoint.storage import Directory, Location, location_of
from remesh.checkpoint.storage.integrity import check_sha256_manifest, read_checksums, write_sha256_manifest
from remesh.checkpoint.storage.save_lock import SaveLock
from remesh.checkpoint.values.description_checks import Mismatch, StrictHandling, parse_strict_flag
from remesh.checkpoint.values.entities import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.checkpoint.values.nests import copy_nest, nested_leaves
from remesh.checkpoint.values.outline import Outline, check_outlines, keys_of
from remesh.checkpoint.values.state_split import TakenApart, take_apart
from remesh.comm.agreement import Agreements, check_alike
from remesh.comm.gather import Group, group_rank, group_size
from remesh.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    call_on_all,
    choose_load_strategy,
    choose_save_strategy,
    get_default_strategy,
    strategy_of,
)
from remesh.dist_checkpointing.strategies.torch import PLANS
from remesh.dist_checkpointing.validation import find_and_report
from remesh.foundation.torch_private import never_compiled

CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]
SaveStrategy = SaveShardedStrategy | tuple[str, int] | None
"""A strategy, the backend and version of a registered one, or None for the default."""
LoadStrategy = LoadShardedStrategy | tuple[str, int] | None
"""A strategy, the backend and version of a registered one, or None for what the checkpoint's marker names."""
StrictResult = tuple[StateDict, set[str], set[str]]
"""Loaded state dict, missing keys, unexpected keys."""

_CONTENT_METADATA_KEY = "content_metadata"
_COMMON_STATE_KEY = "common_state"
"""Object that is common data in checkpoints of later writers, and no key of the application."""


@never_compiled
def save(  # noqa: PLR0913 - the signature that users know
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Directory,
    sharded_strategy: SaveStrategy = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | bool | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    *,
    process_group: Group = None,
) -> AsyncRequest | None:
    """Write a sharded state dict as one checkpoint, and commit it atomically.

    Called by every rank of the group with its own part; blocks until the checkpoint is on disk. The directory must
    exist and hold no complete checkpoint. Raises the same `CheckpointingException` on all ranks; then nothing that
    a reader takes for a checkpoint is there. ``content_metadata`` is the application's own description, found again
    by `load_content_metadata`. With ``async_sharded_save`` it returns once this rank's values are copied; the request
    that it returns is to be scheduled, and its checkpoint exists when it has been finalized. In the fourth place a
    bool means ``validate_access_integrity``, as in later releases. Common data that differs between ranks is a warning;
    ``preprocess_common_before_consistancy_check`` is given a copy and returns what of it is to be compared.
    ``verify_integrity`` adds the SHA-256 sums of all files, after the commit; those of data files are computed while
    they are written. ``async_strategy`` is accepted.
    """
    directory = location_of(checkpoint_dir)
    if isinstance(common_strategy, bool):
        validate_access_integrity, common_strategy = common_strategy, None
    alike = {
        "sharded_strategy": "",
        "async_sharded_save": async_sharded_save,
        "validate_access_integrity": validate_access_integrity,
        "verify_integrity": verify_integrity,
    }

    def prepare() -> _Request:
        strategy = choose_save_strategy(sharded_strategy, async_sharded_save)
        alike["sharded_strategy"] = _kind_of(strategy)
        strategy_of(StrategyAction.SAVE_COMMON, common_strategy)
        apart = take_apart(
            sharded_state_dict, {} if content_metadata is None else {_CONTENT_METADATA_KEY: content_metadata}
        )
        compared, choose = None, preprocess_common_before_consistancy_check
        if validate_access_integrity:
            compared = apart.common if choose is None else choose(copy_nest(apart.common))
        sharded = apart.sharded()
        blobs = strategy.check_can_save(sharded)
        return _Request(apart.entities, apart.common, compared, strategy=strategy, sharded=sharded, blobs=blobs)

    begun = begin_save(
        prepare,
        directory,
        PLANS,
        process_group,
        validate=validate_access_integrity,
        puts_off_common=async_sharded_save,
        options=alike,
    )
    strategy = begun.state.strategy
    commit: _Commit = (begun.lock, process_group, CheckpointingConfig(strategy.backend, strategy.version))
    return _write(begun, commit, in_background=async_sharded_save, with_sha256=verify_integrity)


_Commit = tuple[SaveLock, Group, CheckpointingConfig]
"""Arguments of `commit_save`."""


def _write(begun: Begun[_Request], commit: _Commit, *, in_background: bool, with_sha256: bool) -> AsyncRequest | None:
    """Let the strategy write, and commit; of a save in the background, the request that does both."""
    lock, group, _ = commit
    directory, strategy = lock.directory, begun.state.strategy
    options = {} if group is None else {"process_group": group}
    act: Callable[..., Any] = strategy.async_save if in_background else strategy.save  # type: ignore[attr-defined]
    with writing_in(lock, blobs=begun.state.blobs, with_sha256=with_sha256) as under_way:
        write = partial(act, begun.state.sharded, directory, **options)
        written = call_on_all(strategy, write, group, f"saving checkpoint {directory}")
    request: AsyncRequest | None = None
    if in_background:
        request = _up_to_commit(written, begun, commit)
    else:
        commit_save(*commit)
    if with_sha256:
        sum_up = partial(_sum_up, under_way.sums, directory, group)
        sum_up() if request is None else request.add_finalize_fn(sum_up)
    return request


@dataclass(frozen=True, slots=True)
class _Request(RankState):
    """What one rank wants to be saved, taken apart."""

    strategy: SaveShardedStrategy = field(kw_only=True)
    sharded: ShardedStateDict = field(kw_only=True)
    """The nest of the entities alone."""
    blobs: Mapping[str, bytes] = field(kw_only=True)
    """Objects that the strategy has serialised, by unique key."""


def _up_to_commit(request: AsyncRequest, begun: Begun[_Request], commit: _Commit) -> AsyncRequest:
    """The request with all that is left to do beside the strategy's own part."""
    if begun.common_blob:
        request = request._replace(async_fn=AfterCommon(begun.lock, begun.common_blob, request.async_fn))
    last = request.finalize_fns[-1] if request.finalize_fns else None
    if isinstance(last, Settling):
        last.add(partial(commit_alone, *commit))
    else:
        request.add_finalize_fn(partial(commit_save, *commit))
    return request


@dataclass(frozen=True, slots=True)
class _Planned:
    """One rank's request, taken apart."""

    apart: TakenApart
    common: StateDict
    """Of the checkpoint."""
    kept: dict[Any, Any]
    """The nest of the entities that are stored. Those that are not have no place in the result."""
    stored_keys: set[str]
    """Keys in the checkpoint; empty in a mode that does not ask for them."""
    strategy: LoadShardedStrategy
    mode: StrictHandling

    def told(self, validates: bool) -> list[Any]:
        """What the other ranks need to know of the entities."""
        is_needed = validates or StrictHandling.requires_global_app_metadata(self.mode)
        return outline_in_pieces(self.apart.entities).parts() if is_needed else []


@never_compiled
def load(  # noqa: PLR0913 - the signature that users know
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Directory,
    sharded_strategy: LoadStrategy = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | bool | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    *,
    process_group: Group = None,
) -> StateDict | StrictResult:
    """The state dict that was saved, with this rank's tensors filled in place and cast to their dtypes.

    Called by every rank of the group, of any number; blocks until all have read. The result is the common data of
    the checkpoint with every entity of the request replaced by its value; with a ``return_...`` mode of ``strict``,
    also the missing and the unexpected keys. Raises the same error on all ranks; until every rank has planned its
    reads without error, no tensor is changed on any. In the fourth place a bool means ``validate_access_integrity``.
    With ``verify_integrity`` one rank first compares all files with the SHA-256 sums that `save` has written.
    """
    directory = location_of(checkpoint_dir)
    doing = f"loading checkpoint {directory}"
    if isinstance(common_strategy, bool):
        validate_access_integrity, common_strategy = common_strategy, None

    def plan() -> _Planned:
        reads_common = strategy_of(StrategyAction.LOAD_COMMON, common_strategy)
        if verify_integrity and group_rank(process_group) == 0:
            check_sha256_manifest(directory)
        common = _read_common(directory) if reads_common is None else reads_common.load_common(directory)
        strategy = choose_load_strategy(sharded_strategy, directory)
        return _plan(sharded_state_dict, directory, strategy, common, parse_strict_flag(strict))

    alike: dict[str, Any] = {}

    def tell(planned: _Planned) -> tuple[list[Any], list[Any]]:
        seen = [read_checksums(directory).identity, str(directory)] if group_size(process_group) > 1 else ["", ""]
        alike.update(
            strict=planned.mode.value,
            sharded_strategy=_kind_of(planned.strategy),
            validate_access_integrity=validate_access_integrity,
            verify_integrity=verify_integrity,
        )
        return planned.told(validate_access_integrity), [seen, alike]

    agreement = Agreements(max_kept=0).agree(plan, process_group, doing, tell=tell, translate=as_checkpoint_error)
    check_is_one([seen for seen, _ in agreement.beside])
    check_alike([sent for _, sent in agreement.beside], alike.__getitem__, process_group, doing)
    ours = agreement.value
    outlines = [Outline.from_parts(parts) for parts in agreement.told or [] if parts]
    if validate_access_integrity:
        check_outlines(outlines)
    found = Mismatch()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(ours.mode):
        mine = {one.key for one in ours.apart.entities}
        found = find_and_report(ours.mode, ours.stored_keys, mine, keys_of(outlines), process_group, doing)
    options = {} if process_group is None else {"process_group": process_group}
    read = partial(ours.strategy.load, ours.kept, directory, **options)
    loaded = call_on_all(ours.strategy, read, process_group, doing)
    result = take_step(lambda: _merge(ours, loaded), process_group, doing).mine
    if StrictHandling.requires_returning_mismatch_keys(ours.mode):
        return result, found.missing, found.unexpected
    return result


@never_compiled
def load_common_state_dict(checkpoint_dir: Directory) -> StateDict:
    """The common data of a checkpoint; cheap, to decide on configuration and version before loading."""
    return _read_common(location_of(checkpoint_dir))


@never_compiled
def load_content_metadata(
    checkpoint_dir: Directory | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """What ``save`` was given as ``content_metadata``, or None; from a loaded state dict where there is one."""
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise CheckpointingException("loading content metadata: give checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    found: dict[str, Any] | None = preloaded_state_dict.get(_CONTENT_METADATA_KEY)
    return found


@never_compiled
def load_tensors_metadata(checkpoint_dir: Directory, sharded_strategy: LoadStrategy = None) -> CkptShardedMetadata:
    """Every stored tensor as one shard without data, by key."""
    return {**choose_load_strategy(sharded_strategy, checkpoint_dir).load_tensors_metadata(location_of(checkpoint_dir))}


@never_compiled
def load_sharded_metadata(
    checkpoint_dir: Directory,
    sharded_strategy: LoadStrategy = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> CkptShardedMetadata:
    """`load_tensors_metadata`, and every stored object without data by its unique key."""
    strategy_of(StrategyAction.LOAD_COMMON, common_strategy)
    return choose_load_strategy(sharded_strategy, checkpoint_dir).load_sharded_metadata(location_of(checkpoint_dir))


@never_compiled
def load_plain_tensors(checkpoint_dir: Directory) -> StateDict:
    """Every stored tensor whole, by key, on the CPU. Called by every rank, like `load`."""
    described = load_tensors_metadata(checkpoint_dir)
    loaded = load({**described}, checkpoint_dir, validate_access_integrity=False)
    assert isinstance(loaded, dict)
    return {key: loaded[key] for key in described}


@never_compiled
def remove_sharded_tensors(checkpoint_dir: Directory, key_prefix: str) -> None:
    """Take every tensor whose key starts with the prefix out of a checkpoint. Called by one process.

    The index is replaced in one step; files that nothing else needs are deleted after that.
    """
    choose_load_strategy(None, checkpoint_dir).remove_sharded_tensors(location_of(checkpoint_dir), key_prefix)


def get_default_save_sharded_strategy(backend: str = BACKEND, version: int = BACKEND_VERSION) -> SaveShardedStrategy:
    """The strategy that is registered for saving sharded data."""
    strategy: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return strategy


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> SaveCommonStrategy:
    """The strategy that is registered for saving common data."""
    strategy: SaveCommonStrategy = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return strategy


def get_default_load_sharded_strategy(checkpoint_dir: Directory | None = None) -> LoadShardedStrategy:
    """The strategy that is registered for the format of a checkpoint; without one that of the default format."""
    config = maybe_load_config(checkpoint_dir) if checkpoint_dir is not None else None
    backend = (BACKEND, BACKEND_VERSION) if config is None else (config.sharded_backend, config.sharded_backend_version)
    strategy: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
    return strategy


def _kind_of(strategy: Any) -> str:
    """What of a strategy decides which collectives it makes: a name that is equal on all ranks that use its like."""
    backend = getattr(strategy, "backend", None)
    of_backend = f" of {backend}" if isinstance(backend, str) else ""
    return f"{type(strategy).__module__}.{type(strategy).__qualname__}{of_backend}"


def _sum_up(sums: Mapping[str, str], directory: Location, group: Group) -> None:
    """Write the SHA-256 sums of all files, of which some are known. Called by every rank, after the commit."""
    take_first_step(lambda: write_sha256_manifest(directory, sums), group, f"summing up checkpoint {directory}")


def _read_common(directory: Location) -> StateDict:
    config = maybe_load_config(directory)
    if config is not None and (config.sharded_backend, config.sharded_backend_version) not in READABLE:
        return load_common(directory)  # the sharded data is for another strategy, common data has one form
    return read_common(directory)


def _plan(
    sharded_state_dict: ShardedStateDict,
    directory: Location,
    strategy: LoadShardedStrategy,
    common: StateDict,
    strict: StrictHandling,
) -> _Planned:
    apart, stored = take_apart(sharded_state_dict), set[str]()
    kept = apart.sharded()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        stored = {one.key for one in strategy.load_sharded_metadata(directory).values()} - {_COMMON_STATE_KEY}
        kept = apart.sharded(lambda entity: entity.key in stored)
    return _Planned(apart, common, kept, stored, strategy, strict)


def _merge(planned: _Planned, loaded: StateDict) -> StateDict:
    values: dict[int, Any] = {}
    for path, entity in nested_leaves(planned.kept):
        value: Any = loaded
        for key in path:
            value = value[key]
        values[id(entity)] = value
    return planned.apart.put_together(planned.common, values)
