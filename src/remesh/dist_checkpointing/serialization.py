"""Save and load sharded state dicts: the entry points that replace ``torch.save`` and ``torch.load``.

All functions accept any path-like directory. Those that are not marked otherwise communicate with nobody.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remesh.dist_checkpointing.description import describe, entities_from
from remesh.dist_checkpointing.dict_utils import LEFT_OUT, graft
from remesh.dist_checkpointing.errors import CheckpointingException, CheckpointMismatchError, told_as_checkpoint_errors
from remesh.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from remesh.dist_checkpointing.reader import (
    Fill,
    OpenCheckpoint,
    describe_whole,
    open_checkpoint,
    plan_fill,
    read_common,
    run_fill,
)
from remesh.dist_checkpointing.state_split import expand, split
from remesh.dist_checkpointing.strategies.torch import BACKEND, BACKEND_VERSION
from remesh.dist_checkpointing.validation import (
    StrictHandling,
    compute_mismatched_keys,
    decide_on_mismatch,
    parse_strict_flag,
    validate_sharding_integrity,
)
from remesh.dist_checkpointing.writer import State, save_state
from remesh.reshard.exchange import Group, gather_from

logger = logging.getLogger(__name__)

Directory = str | os.PathLike[str]
CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]
Strategy = tuple[str, int] | None
"""Backend and version; None is the default."""
StrictResult = tuple[StateDict, set[str], set[str]]
"""Loaded state dict, missing keys, unexpected keys."""

_CONTENT_METADATA_KEY = "content_metadata"


def save(  # noqa: PLR0913 - the signature that users know
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Directory,
    sharded_strategy: Strategy = None,
    common_strategy: bool | None = None,
    validate_access_integrity: bool = True,
    *,
    content_metadata: dict[str, Any] | None = None,
    process_group: Group = None,
) -> None:
    """Write a sharded state dict as one checkpoint, and commit it atomically.

    Called by every rank of the group with its own part; blocks until the checkpoint is on disk. The directory must
    exist and hold no complete checkpoint. Raises the same `CheckpointingException` on all ranks; then nothing that
    a reader takes for a checkpoint is there. ``content_metadata`` is the application's own description, found again
    by `load_content_metadata`. In the fourth place a bool means ``validate_access_integrity``, as in later releases.
    """
    directory = Path(checkpoint_dir)
    if isinstance(common_strategy, bool):
        validate_access_integrity, common_strategy = common_strategy, None

    def prepare() -> State:
        _check_strategy(sharded_strategy, common_strategy)
        state = dict(sharded_state_dict)
        if content_metadata is not None:
            state[_CONTENT_METADATA_KEY] = content_metadata
        expanded, _ = expand(state)
        entities, _, common = split(expanded)
        return State(entities, common)

    save_state(prepare, directory, process_group, validate=validate_access_integrity)


@dataclass(frozen=True, slots=True)
class _Planned:
    """One rank's load after planning: nothing of the caller's has been changed yet."""

    checkpoint: OpenCheckpoint
    expanded: dict[Any, Any]
    factories: dict[Any, Any]
    entities: list[ShardedBase]
    nonpersistent: list[LocalNonpersistentObject]
    kept: list[ShardedBase]
    """Entities that are stored. Those that are not have no place in the result."""
    fill: Fill


def load(  # noqa: PLR0913 - the signature that users know
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Directory,
    sharded_strategy: Strategy = None,
    common_strategy: bool | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    process_group: Group = None,
) -> StateDict | StrictResult:
    """The state dict that was saved, with this rank's tensors filled in place and cast to their dtypes.

    Called by every rank of the group, of any number; blocks until all have read. The result is the common data of
    the checkpoint with every entity of the request replaced by its value; with a ``return_...`` mode of ``strict``,
    also the missing and the unexpected keys. Raises the same error on all ranks; until every rank has planned its
    reads without error, no tensor is changed on any.
    """
    directory = Path(checkpoint_dir)
    doing = f"loading checkpoint {directory}"
    if isinstance(common_strategy, bool):
        validate_access_integrity, common_strategy = common_strategy, None
    planned: list[_Planned] = []

    def plan() -> list[Any]:
        with told_as_checkpoint_errors(doing):
            _check_strategy(sharded_strategy, common_strategy)
            planned.append(_plan(sharded_state_dict, directory, parse_strict_flag(strict)))
        return describe(planned[0].entities)

    everywhere = [entities_from(descriptions) for descriptions in gather_from(plan, process_group, doing)]
    ours = planned[0]
    if validate_access_integrity:
        validate_sharding_integrity(everywhere)
    mode = parse_strict_flag(strict)
    missing, unexpected = _handle_mismatch(mode, ours, everywhere, process_group, doing)

    def fill() -> None:
        with told_as_checkpoint_errors(doing):
            results.append(_fill(directory, ours))

    results: list[StateDict] = []
    gather_from(fill, process_group, doing)
    if StrictHandling.requires_returning_mismatch_keys(mode):
        return results[0], missing, unexpected
    return results[0]


def load_common_state_dict(checkpoint_dir: Directory) -> StateDict:
    """The common data of a checkpoint; cheap, to decide on configuration and version before loading."""
    return read_common(Path(checkpoint_dir))


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


def load_tensors_metadata(checkpoint_dir: Directory, sharded_strategy: Strategy = None) -> CkptShardedMetadata:
    """Every stored tensor as one shard without data, by key."""
    _check_strategy(sharded_strategy, None)
    return {**describe_whole(open_checkpoint(Path(checkpoint_dir)).manifest)}


def load_sharded_metadata(checkpoint_dir: Directory, sharded_strategy: Strategy = None) -> CkptShardedMetadata:
    """`load_tensors_metadata`, and every stored object without data by its unique key."""
    _check_strategy(sharded_strategy, None)
    manifest = open_checkpoint(Path(checkpoint_dir)).manifest
    objects = {name: ShardedObject.empty_from_unique_key(name) for name in manifest.objects}
    return {**describe_whole(manifest), **objects}


def load_plain_tensors(checkpoint_dir: Directory) -> StateDict:
    """Every stored tensor whole, by key, on the CPU, and the common data. Called by every rank, like `load`."""
    loaded = load({**load_tensors_metadata(checkpoint_dir)}, checkpoint_dir, validate_access_integrity=False)
    assert isinstance(loaded, dict)
    return loaded


def _check_strategy(sharded_strategy: Any, common_strategy: Any) -> None:
    if sharded_strategy is not None and sharded_strategy != (BACKEND, BACKEND_VERSION):
        raise CheckpointingException(
            f"Cannot find a default strategy for: {sharded_strategy!r}; expected None or {(BACKEND, BACKEND_VERSION)}"
        )
    if common_strategy is not None:
        raise CheckpointingException(
            f"choosing how to write common data: found common_strategy={common_strategy!r}, expected None; there is "
            "one form of common data"
        )


def _plan(sharded_state_dict: ShardedStateDict, directory: Path, strict: StrictHandling) -> _Planned:
    checkpoint = open_checkpoint(directory)
    expanded, factories = expand(sharded_state_dict)
    entities, nonpersistent, _ = split(expanded)
    kept = entities
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        _, unexpected = compute_mismatched_keys(checkpoint.stored_keys(), entities)
        kept = [entity for entity in entities if entity.key not in unexpected]
    fill = plan_fill(checkpoint, kept)
    return _Planned(checkpoint, expanded, factories, entities, nonpersistent, kept, fill)


def _handle_mismatch(
    mode: StrictHandling, planned: _Planned, everywhere: Sequence[Sequence[ShardedBase]], group: Group, doing: str
) -> tuple[set[str], set[str]]:
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    wants_all = StrictHandling.requires_global_app_metadata(mode)
    missing, unexpected = compute_mismatched_keys(
        planned.checkpoint.stored_keys(), planned.entities, everywhere if wants_all else None
    )
    warnings: list[str | None] = []
    gather_from(lambda: warnings.append(decide_on_mismatch(mode, missing, unexpected)), group, doing)
    if warnings[0] is not None:
        logger.warning(warnings[0])
    return missing, unexpected


def _fill(directory: Path, planned: _Planned) -> StateDict:
    tensors, objects = run_fill(directory, planned.fill)
    filled: dict[int, Any] = {id(entity): LEFT_OUT for entity in planned.entities}
    filled |= {id(wrapper): wrapper.unwrap() for wrapper in planned.nonpersistent}
    ordered: list[ShardedBase] = [entity for entity in planned.kept if isinstance(entity, ShardedTensor)]
    ordered += [entity for entity in planned.kept if isinstance(entity, ShardedObject)]
    filled |= {id(entity): value for entity, value in zip(ordered, [*tensors, *objects], strict=True)}
    result = graft(planned.expanded, planned.checkpoint.common, filled)
    assert isinstance(result, dict)
    try:
        merged: StateDict = apply_factory_merges(result, planned.factories)
    except ValueError as raised:
        raise CheckpointMismatchError(f"merging what factories were built of: {raised}") from raised
    return merged
