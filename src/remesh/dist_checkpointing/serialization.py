"""Save and load sharded state dicts: the entry points that replace ``torch.save`` and ``torch.load``.

All functions accept a path for the directory, or a URL that fsspec knows. Those that are not marked otherwise
communicate with nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from remesh.checkpoint.background.callers import AsyncRequest
from remesh.checkpoint.background.settling import Settling
from remesh.checkpoint.errors import (
    CheckpointingException,
    CheckpointMismatchError,
    as_checkpoint_error,
)
from remesh.checkpoint.formats.directory import CheckpointingConfig, load_common, maybe_load_config
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.run.reader import READABLE, check_is_one, read_common
from remesh.checkpoint.run.steps import take_first_step, take_step
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
from remesh.checkpoint.values.checks import (
    StrictHandling,
    decide_on_mismatch,
    find_mismatch,
    parse_strict_flag,
)
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from remesh.checkpoint.values.nests import (
    HOLE,
    copy_nest,
    extract_matching_values,
    graft,
    nested_leaves,
    without_holes,
)
from remesh.checkpoint.values.outline import Outline, check_outlines, keys_of
from remesh.checkpoint.values.state_split import expand, split, stored_factories
from remesh.comm.agreement import Agreements, check_alike
from remesh.comm.gather import Group, group_rank, group_size, step_together
from remesh.dist_checkpointing.strategies import torch, zarr  # noqa: F401 - register themselves
from remesh.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    call_on_all,
    check_common_strategy,
    check_save_strategy,
    choose_load_strategy,
    find_save_strategy,
    get_default_strategy,
)

logger = logging.getLogger(__name__)

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
_COMMON_BACKEND, _COMMON_VERSION = "torch", 1


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
    strategy = find_save_strategy(sharded_strategy)

    def prepare() -> _Request:
        check_save_strategy(strategy, sharded_strategy, async_sharded_save)
        check_common_strategy(common_strategy, SaveCommonStrategy)
        request = _request_of(sharded_state_dict, content_metadata)
        strategy.check_can_save(request.sharded)
        if not validate_access_integrity:
            return request
        common, choose = request.common, preprocess_common_before_consistancy_check
        return replace(request, compared=common if choose is None else choose(copy_nest(common)))

    alike = {
        "sharded_strategy": _kind_of(strategy),
        "async_sharded_save": async_sharded_save,
        "validate_access_integrity": validate_access_integrity,
        "verify_integrity": verify_integrity,
    }
    try:
        begun = begin_save(
            prepare,
            directory,
            _plans_of(strategy),
            process_group,
            validate=validate_access_integrity,
            puts_off_common=async_sharded_save,
            options=alike,
        )
    except BaseException:
        if isinstance(strategy, SaveShardedStrategy):
            strategy.abandon()
        raise
    if verify_integrity:
        strategy.ask_for_sums()
    request = _begin_behind(strategy, begun, process_group) if async_sharded_save else None
    if request is None:
        _store(strategy, begun, process_group)
    if verify_integrity:
        sum_up = partial(_sum_up, strategy, directory, process_group)
        sum_up() if request is None else request.add_finalize_fn(sum_up)
    return request


@dataclass(frozen=True, slots=True)
class _Request(RankState):
    """What one rank wants to be saved, taken apart."""

    sharded: ShardedStateDict = field(default_factory=dict)
    """The nest of the entities alone."""


def _request_of(state: ShardedStateDict, content_metadata: Mapping[str, Any] | None) -> _Request:
    if not isinstance(state, Mapping):
        raise CheckpointMismatchError(
            f"taking a sharded state dict apart: found a {type(state).__name__}, expected a dict; give the dict that "
            "holds the state"
        )
    added = {} if content_metadata is None else {_CONTENT_METADATA_KEY: content_metadata}
    expanded, _ = expand({**state, **added})
    entities, _, common = split(expanded)
    return _Request(entities, common, sharded=_sharded_part(expanded, lambda entity: True))


def _store(strategy: SaveShardedStrategy, begun: Begun[_Request], group: Group) -> None:
    options = {} if group is None else {"process_group": group}
    directory = begun.turn.directory
    doing = f"saving checkpoint {directory}"
    with writing_in(begun.turn):
        call_on_all(strategy, lambda: strategy.save(begun.state.sharded, directory, **options), group, doing)
    commit_save(begun.turn, group, _config_of(strategy))


def _begin_behind(strategy: AsyncSaveShardedStrategy, begun: Begun[_Request], group: Group) -> AsyncRequest:
    """Let the strategy copy its values; what is left to do, up to the commit."""
    options = {} if group is None else {"process_group": group}
    turn, directory = begun.turn, begun.turn.directory
    doing = f"saving checkpoint {directory}"
    with writing_in(turn):
        save_one = partial(strategy.async_save, begun.state.sharded, directory, **options)
        request = step_together(save_one, group, doing).mine
    if begun.common_blob:
        request = request._replace(async_fn=AfterCommon(turn, begun.common_blob, request.async_fn))
    last = request.finalize_fns[-1] if request.finalize_fns else None
    if isinstance(last, Settling):
        last.add(partial(commit_alone, turn, group, _config_of(strategy)))
    else:
        request.add_finalize_fn(partial(commit_save, turn, group, _config_of(strategy)))
    return request


@dataclass(frozen=True, slots=True)
class _Planned:
    """One rank's request, taken apart."""

    common: StateDict
    expanded: dict[Any, Any]
    factories: dict[Any, Any]
    entities: list[ShardedBase]
    nonpersistent: list[LocalNonpersistentObject]
    kept: dict[Any, Any]
    """The nest of the entities that are stored. Those that are not have no place in the result."""
    stored_keys: set[str]
    """Keys in the checkpoint; empty in a mode that does not ask for them."""
    strategy: LoadShardedStrategy
    mode: StrictHandling

    @property
    def needs_keys_of_all(self) -> bool:
        return StrictHandling.requires_global_app_metadata(self.mode)


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
        check_common_strategy(common_strategy, LoadCommonStrategy)
        if verify_integrity and group_rank(process_group) == 0:
            check_sha256_manifest(directory)
        common = _read_common(directory) if common_strategy is None else _common(common_strategy, directory)
        strategy = choose_load_strategy(sharded_strategy, directory)
        return _plan(sharded_state_dict, directory, strategy, common, parse_strict_flag(strict))

    alike: dict[str, Any] = {
        "strict": "",
        "sharded_strategy": "",
        "validate_access_integrity": validate_access_integrity,
        "verify_integrity": verify_integrity,
    }

    def outline(planned: _Planned) -> tuple[list[Any], list[Any]]:
        is_told = validate_access_integrity or planned.needs_keys_of_all
        seen = [read_checksums(directory).identity, str(directory)] if group_size(process_group) > 1 else ["", ""]
        alike.update(strict=planned.mode.value, sharded_strategy=_kind_of(planned.strategy))
        return outline_in_pieces(planned.entities).parts() if is_told else [], [seen, alike]

    agreement = Agreements(max_kept=0).agree(plan, process_group, doing, tell=outline, translate=as_checkpoint_error)
    check_is_one([seen for seen, _ in agreement.beside])
    check_alike([told for _, told in agreement.beside], alike.__getitem__, process_group, doing)
    ours = agreement.value
    outlines = [Outline.from_parts(parts) for parts in agreement.told or [] if parts]
    if validate_access_integrity:
        check_outlines(outlines)
    found = find_mismatch(ours.mode, ours.stored_keys, {one.key for one in ours.entities}, keys_of(outlines))
    report = partial(decide_on_mismatch, ours.mode, found.missing, found.reported)
    if (warning := step_together(report, process_group, doing).mine) is not None:
        logger.warning(warning)
    options = {} if process_group is None else {"process_group": process_group}
    loaded = call_on_all(
        ours.strategy, lambda: ours.strategy.load(ours.kept, directory, **options), process_group, doing
    )
    result = take_step(lambda: _merge(ours, loaded), process_group, doing).mine
    if StrictHandling.requires_returning_mismatch_keys(ours.mode):
        return result, found.missing, found.unexpected
    return result


def load_common_state_dict(checkpoint_dir: Directory) -> StateDict:
    """The common data of a checkpoint; cheap, to decide on configuration and version before loading."""
    return _read_common(location_of(checkpoint_dir))


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


def load_tensors_metadata(checkpoint_dir: Directory, sharded_strategy: LoadStrategy = None) -> CkptShardedMetadata:
    """Every stored tensor as one shard without data, by key."""
    return {
        **choose_load_strategy(sharded_strategy, location_of(checkpoint_dir)).load_tensors_metadata(
            location_of(checkpoint_dir)
        )
    }


def load_sharded_metadata(
    checkpoint_dir: Directory,
    sharded_strategy: LoadStrategy = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> CkptShardedMetadata:
    """`load_tensors_metadata`, and every stored object without data by its unique key."""
    check_common_strategy(common_strategy, LoadCommonStrategy)
    return choose_load_strategy(sharded_strategy, location_of(checkpoint_dir)).load_sharded_metadata(
        location_of(checkpoint_dir)
    )


def load_plain_tensors(checkpoint_dir: Directory) -> StateDict:
    """Every stored tensor whole, by key, on the CPU. Called by every rank, like `load`."""
    described = load_tensors_metadata(checkpoint_dir)
    loaded = load({**described}, checkpoint_dir, validate_access_integrity=False)
    assert isinstance(loaded, dict)
    return {key: loaded[key] for key in described}


def remove_sharded_tensors(checkpoint_dir: Directory, key_prefix: str) -> None:
    """Take every tensor whose key starts with the prefix out of a checkpoint. Called by one process.

    The index is replaced in one step; files that nothing else needs are deleted after that.
    """
    choose_load_strategy(None, location_of(checkpoint_dir)).remove_sharded_tensors(
        location_of(checkpoint_dir), key_prefix
    )


def get_default_save_sharded_strategy(backend: str = BACKEND, version: int = BACKEND_VERSION) -> SaveShardedStrategy:
    """The strategy that is registered for saving sharded data."""
    strategy: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return strategy


def get_default_save_common_strategy(
    backend: str = _COMMON_BACKEND, version: int = _COMMON_VERSION
) -> SaveCommonStrategy:
    """The strategy that is registered for saving common data."""
    strategy: SaveCommonStrategy = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return strategy


def get_default_load_sharded_strategy(checkpoint_dir: Directory | None = None) -> LoadShardedStrategy:
    """The strategy that is registered for the format of a checkpoint; without one that of the default format."""
    config = maybe_load_config(checkpoint_dir) if checkpoint_dir is not None else None
    backend = (BACKEND, BACKEND_VERSION) if config is None else (config.sharded_backend, config.sharded_backend_version)
    strategy: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
    return strategy


def _plans_of(strategy: Any) -> Agreements:
    """The plan cache of the strategy."""
    return strategy.plans if isinstance(strategy, SaveShardedStrategy) else Agreements(max_kept=0)


def _kind_of(strategy: Any) -> str:
    """What of a strategy tells which collectives it makes: a name that is equal on all ranks that use its like."""
    backend = getattr(strategy, "backend", None)
    of_backend = f" of {backend}" if isinstance(backend, str) else ""
    return f"{type(strategy).__module__}.{type(strategy).__qualname__}{of_backend}"


def _config_of(strategy: SaveShardedStrategy) -> CheckpointingConfig:
    return CheckpointingConfig(strategy.backend, strategy.version)


def _sum_up(strategy: SaveShardedStrategy, directory: Location, group: Group) -> None:
    """Write the SHA-256 sums of all files, of which the strategy knows some. Called by every rank, after the commit."""
    sums = strategy.take_sums()
    take_first_step(lambda: write_sha256_manifest(directory, sums), group, f"summing up checkpoint {directory}")


def _read_common(directory: Location) -> StateDict:
    config = maybe_load_config(directory)
    if config is not None and (config.sharded_backend, config.sharded_backend_version) not in READABLE:
        return load_common(directory)  # the sharded data is for another strategy, common data has one form
    return read_common(directory)


def _common(given: Any, directory: Location) -> StateDict:
    strategy = get_default_strategy(StrategyAction.LOAD_COMMON, *given) if isinstance(given, tuple) else given
    common: StateDict = strategy.load_common(directory)
    return common


def _sharded_part(expanded: dict[Any, Any], keep: Callable[[ShardedBase], bool]) -> dict[Any, Any]:
    """The nest of the entities alone, at their old places: a list is a dict by index there."""
    part, _ = extract_matching_values(
        expanded, lambda leaf: isinstance(leaf, ShardedBase) and keep(leaf), return_lists_as_dicts=True
    )
    assert isinstance(part, dict)
    return part


def _plan(
    sharded_state_dict: ShardedStateDict,
    directory: Location,
    strategy: LoadShardedStrategy,
    common: StateDict,
    strict: StrictHandling,
) -> _Planned:
    expanded, factories = expand(sharded_state_dict)
    entities, nonpersistent, _ = split(expanded)
    stored_keys: set[str] = set()
    kept = _sharded_part(expanded, lambda entity: True)
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        stored_keys = {one.key for one in strategy.load_sharded_metadata(directory).values()} - {_COMMON_STATE_KEY}
        kept = _sharded_part(expanded, lambda entity: entity.key in stored_keys)
    return _Planned(common, expanded, factories, entities, nonpersistent, kept, stored_keys, strategy, strict)


def _merge(planned: _Planned, loaded: StateDict) -> StateDict:
    filled: dict[int, Any] = {id(entity): HOLE for entity in planned.entities}
    filled |= {id(wrapper): wrapper.unwrap() for wrapper in planned.nonpersistent}
    stored = set()
    for path, entity in nested_leaves(planned.kept):
        value: Any = loaded
        for key in path:
            value = value[key]
        filled[id(entity)] = value
        stored.add(id(entity))
    factories, dropped = stored_factories(planned.factories, planned.expanded, stored)
    filled |= {id(built): HOLE for built in dropped}
    result = graft(planned.expanded, planned.common, filled)
    assert isinstance(result, dict)
    try:
        merged: StateDict = apply_factory_merges(result, factories)
    except ValueError as raised:
        raise CheckpointMismatchError(f"merging what factories were built of: {raised}") from raised
    return merged if len(stored) == len(planned.entities) else without_holes(merged)
