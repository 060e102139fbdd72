"""A save by native torch's planner in two halves, with the writing between them: see `filesystem_async`.

plan       every rank: what it holds; the coordinator: one plan for all. Values are copied
(write)    each rank on its own, in the background
finalize   every rank: what it has written; the coordinator: the index, after which the checkpoint exists
"""

from __future__ import annotations

from typing import Any, overload

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, Metadata, SavePlan, SavePlanner

from remesh.checkpoint.errors import CheckpointingException
from remesh.checkpoint.run.steps import take_step
from remesh.comm.gather import Group, gather_from, group_rank, step_together
from remesh.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, result_of
from remesh.foundation.torch_private import DistWrapper

Planned = tuple[FileSystemWriterAsync, Metadata | None, DistWrapper]
"""Arguments of `save_state_dict_async_finalize`; metadata on the coordinator only, and when it was planned anew."""


Cached = tuple[SavePlan | None, SavePlan | None, bool]
"""The plan of the save before, as agreed on and as it was told, and whether its caller takes it for good."""


@overload
def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Group = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: Cached | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> tuple[Planned, SavePlan, SavePlan, bool, bool]:
    """Plan a save in the background, for callers that keep plans themselves."""


@overload
def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Group = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    *,
    enable_cache: bool,
) -> Planned:
    """Plan a save in the background, for callers that keep no plans: training loops with their own background saves."""


def save_state_dict_async_plan(  # noqa: PLR0913 - the signature that users know
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Group = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: Cached | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
    *,
    enable_cache: bool | None = None,
) -> Planned | tuple[Planned, SavePlan, SavePlan, bool, bool]:
    """Plan a save and copy its values. Called by every rank of the group; blocks until all have.

    With ``enable_cache``, whatever its value, only the arguments of `save_state_dict_async_finalize` come back: every
    save is planned anew, so that a state of another structure is saved as it is. Otherwise returns those arguments, the
    plan of this rank as agreed on and as it was told, and whether plans of the save before (``cached_ckpt_structure``)
    and of a loaded checkpoint (``loaded_all_plans``) could be used. Where they can, nothing is planned, and the caller
    gives the metadata of that save to the second half.
    """
    wrapper = DistWrapper(process_group, dist.is_initialized(), coordinator_rank)
    planner = planner or DefaultSavePlanner()
    agreed_before, told_before, _ = cached_ckpt_structure or (None, None, False)
    metadata: Metadata | None = None

    def plan_alone() -> SavePlan:
        storage_writer.set_up_storage_writer(wrapper.is_coordinator)
        planner.set_up_planner(state_dict, storage_writer.storage_meta(), wrapper.is_coordinator)
        return storage_writer.prepare_local_plan(planner.create_local_plan())

    def agree(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        agreed, metadata = planner.create_global_plan(plans)
        return storage_writer.prepare_global_plan(agreed)

    doing = "planning a save"
    told = step_together(plan_alone, process_group, doing).mine
    is_as_before = agreed_before is not None and all(
        gather_from(lambda: bool(told == told_before), process_group, doing)
    )
    is_as_loaded = bool(loaded_all_plans) and verify_global_md_reuse(
        loaded_all_plans or [], told, group_rank(process_group), wrapper
    )
    if is_as_before and agreed_before is not None:
        agreed = agreed_before
    elif is_as_loaded:
        agreed = storage_writer.prepare_decentralized_global_plan(told)
    else:
        try:
            agreed = wrapper.reduce_scatter("plan", lambda: told, agree)
        except CheckpointException as raised:  # which is no Exception, and the same on all ranks
            raise CheckpointingException(f"{doing}: {raised}") from raised
    agreed = planner.finish_plan(agreed)
    gather_from(lambda: storage_writer.prepare_write_data(agreed, planner), process_group, "copying values to save")
    planned = storage_writer, metadata, wrapper
    return planned if enable_cache is not None else (planned, agreed, told, is_as_before, is_as_loaded)


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan], local_plan: SavePlan, rank: int, dist_wrapper: DistWrapper
) -> bool:
    """Whether every rank plans now what the plans of a checkpoint say. Called by every rank."""

    def is_same() -> bool:
        if rank >= len(loaded_all_plans):
            return False
        loaded = loaded_all_plans[rank]
        return bool(loaded.items == local_plan.items)

    return all(gather_from(is_same, dist_wrapper.group, "comparing plans"))


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: DistWrapper
) -> None:
    """Write the index of what all ranks have written. Called by every rank of the group; an error is raised on all."""
    doing = f"saving checkpoint {storage_writer.checkpoint_dir}"
    written = gather_from(storage_writer.take_rows, dist_wrapper.group, doing)

    def finish() -> None:
        if dist_wrapper.is_coordinator:
            assert global_metadata is not None, "the coordinator has planned, or was given what it planned before"
            storage_writer.finish(global_metadata, [[result_of(row) for row in rows] for rows in written])

    take_step(finish, dist_wrapper.group, doing)
