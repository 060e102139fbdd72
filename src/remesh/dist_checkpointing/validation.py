"""Checks of a save and a load, with Megatron Core's names.

What is checked stands in `remesh.checkpoint.values.description_checks`, which is pure. Here it meets the other ranks,
the log and the directory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from remesh.checkpoint.formats.directory import CheckpointingConfig
from remesh.checkpoint.run.common_data import digest_of, warn_of_differences
from remesh.checkpoint.run.reader import find_marker
from remesh.checkpoint.run.writer import outline_in_pieces
from remesh.checkpoint.storage import Directory, location_of
from remesh.checkpoint.storage.integrity import SHA256_FNAME, check_sha256_manifest, write_sha256_manifest
from remesh.checkpoint.values.description_checks import (
    Mismatch,
    StrictHandling as StrictHandling,
    decide_on_mismatch,
    find_mismatch,
    parse_strict_flag as parse_strict_flag,
)
from remesh.checkpoint.values.entities import (
    CommonStateDict,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from remesh.checkpoint.values.nests import extract_matching_values, nested_values
from remesh.checkpoint.values.outline import Outline, check_outlines
from remesh.comm.gather import Group, gather_from, step_together
from remesh.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    StrategyAction,
    choose_load_strategy,
    strategy_of,
)

INTEGRITY_FNAME = SHA256_FNAME

logger = logging.getLogger(__name__)

_LocalMetadata = list[ShardedBase]
_GlobalMetadata = Sequence[Sequence[ShardedBase]]
_StoredMetadata = dict[str, ShardedTensor | ShardedObject]


def validate_sharding_integrity(
    global_metadata: _GlobalMetadata, common_state_dict: CommonStateDict | None = None
) -> None:
    """Raise `CheckpointingException` unless the main replicas of all ranks fill everything exactly once.

    ``global_metadata`` holds the entities of each rank, by rank; all ranks that call it with the same value raise
    alike. With ``common_state_dict`` it is called by every rank, and warns where common data differs from rank 0's.
    """
    if common_state_dict is not None:
        _validate_common_state_dict(common_state_dict)
    check_outlines([outline_in_pieces(entities) for entities in global_metadata])


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: Group = None
) -> tuple[_LocalMetadata, list[_LocalMetadata]]:
    """The entities of this rank and those of each rank, without data; flattened slices of others as their pieces.

    Called by every rank of the group; blocks until all have called it.
    """
    local = [leaf.without_data() for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedBase)]
    doing = "describing the entities of all ranks"
    gathered = gather_from(lambda: outline_in_pieces(local).parts(), process_group, doing)
    return local, [Outline.from_parts(parts).entities() for parts in gathered]


def find_and_report(
    strict: StrictHandling, stored: set[str], local: set[str], everywhere: set[str], group: Group, doing: str
) -> Mismatch:
    """`find_mismatch`, reported as the mode asks: logged, or raised on all ranks. Called by every rank of the group."""
    found = find_mismatch(strict, stored, local, everywhere)
    decide = partial(decide_on_mismatch, strict, found.missing, found.reported)
    if (warning := step_together(decide, group, doing).mine) is not None:
        logger.warning(warning)
    return found


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: _LocalMetadata | None = None,
    global_metadata: _GlobalMetadata | None = None,
    ckpt_sharded_metadata: _StoredMetadata | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """The request without unexpected keys, the missing keys and the unexpected ones, reported as the mode asks.

    What is returned is this rank's; an error of ``raise_all`` names the unexpected keys of all ranks. Metadata that the
    mode or the check of integrity needs must be given; ValueError where it is not.
    """
    found = Mismatch()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None or local_metadata is None:
            raise ValueError(f"Cannot check keys in mode {strict}: give local_metadata and ckpt_sharded_metadata")
        if global_metadata is None and StrictHandling.requires_global_app_metadata(strict):
            raise ValueError(f"Cannot check keys in mode {strict}: give global_metadata")
        found = _compared(strict, ckpt_sharded_metadata, local_metadata, global_metadata)
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, found.absent)
        if (warning := decide_on_mismatch(strict, found.missing, found.reported)) is not None:
            logger.warning(warning)
    if validate_access_integrity:
        if global_metadata is None:
            raise ValueError("Cannot check integrity: give global_metadata")
        validate_sharding_integrity(global_metadata)
    return sharded_state_dict, found.missing, found.unexpected


def adjust_non_strict_load(sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]) -> ShardedStateDict:
    """The nest without the entities of these keys."""
    _, kept = extract_matching_values(
        sharded_state_dict, lambda leaf: isinstance(leaf, ShardedBase) and leaf.key in sharded_keys_to_remove
    )
    assert isinstance(kept, dict)
    return kept


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise `CheckpointingException`, or warn, unless both are empty; ``unexpected_keys`` are this rank's."""
    mode = StrictHandling.RAISE_UNEXPECTED if raise_error else StrictHandling.LOG_UNEXPECTED
    if (warning := decide_on_mismatch(mode, missing_keys, unexpected_keys)) is not None:
        logger.warning(warning)


def verify_checkpoint(checkpoint_dir: Directory) -> CheckpointingConfig:
    """The marker of a checkpoint; raises `CheckpointingException` when the directory does not hold one."""
    found = find_marker(location_of(checkpoint_dir), allow_native=False)
    assert isinstance(found, CheckpointingConfig)
    return found


def save_integrity_manifest(checkpoint_dir: Directory) -> None:
    """Write the SHA-256 sums of all files of a complete checkpoint beside them. Called by one process."""
    write_sha256_manifest(location_of(checkpoint_dir))


def verify_integrity_manifest(checkpoint_dir: Directory) -> None:
    """Raise `CheckpointingException` unless every file has the SHA-256 sum that was written. Called by one process."""
    check_sha256_manifest(location_of(checkpoint_dir))


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: Directory,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """The strategies that read a checkpoint: those given, or those that its marker names."""
    config = verify_checkpoint(checkpoint_dir)
    common = common_strategy or (config.common_backend, config.common_backend_version)
    return choose_load_strategy(sharded_strategy, checkpoint_dir), strategy_of(StrategyAction.LOAD_COMMON, common)


def _determine_missing_and_unexpected_keys(
    ckpt_sharded_metadata: _StoredMetadata,
    local_metadata: _LocalMetadata,
    global_metadata: _GlobalMetadata | None = None,
) -> tuple[set[str], set[str]]:
    mode = StrictHandling.RETURN_UNEXPECTED if global_metadata is None else StrictHandling.RETURN_ALL
    found = _compared(mode, ckpt_sharded_metadata, local_metadata, global_metadata)
    return found.missing, found.unexpected


def _compared(
    strict: StrictHandling, stored: _StoredMetadata, local: _LocalMetadata, everywhere: _GlobalMetadata | None
) -> Mismatch:
    wanted = {one.key for entities in everywhere or () for one in entities}
    return find_mismatch(strict, {one.key for one in stored.values()}, {one.key for one in local}, wanted)


def _validate_common_state_dict(common_state_dict: CommonStateDict, process_group: Group = None) -> None:
    """Warn where common data differs from rank 0's. Called by every rank of the group."""
    digests = gather_from(lambda: digest_of(common_state_dict), process_group, "comparing common data")
    if len({digest for digest in digests if digest is not None}) > 1:
        warn_of_differences(common_state_dict, process_group)
