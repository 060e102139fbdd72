"""A save by native torch's planner in two halves, with the writing between them: see `filesystem_async`.

plan       every rank: what it holds; the coordinator: one plan for all. Values are copied
(write)    each rank on its own, in the background
finalize   every rank: what it has written; the coordinator: the index, after which the checkpoint exists
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, Metadata, SavePlan, SavePlanner

from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.run.collective_steps import take_step
from remesh.comm.gather import Group, gather_from, step_together
from remesh.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, result_of
from remesh.foundation.torch_private import DistWrapper


def save_state_dict_async_plan(  # noqa: PLR0913 - the signature that users know
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Group = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: Any = None,
    loaded_all_plans: list[SavePlan] | None = None,
    *,
    enable_cache: bool | None = None,
) -> Any:
    """Plan a save and copy its values. Called by every rank of the group; blocks until all have.

    Every save is planned anew, so that a state of another structure is saved as it is; plans of the save before and of
    a loaded checkpoint are accepted and change nothing. With ``enable_cache``, whatever its value, the arguments of
    `save_state_dict_async_finalize` come back; otherwise these, the plan of this rank as agreed on and as it was sent,
    and twice False: neither plan was used again.
    """
    wrapper = DistWrapper(process_group, dist.is_initialized(), coordinator_rank)
    planner = planner or DefaultSavePlanner()
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
    sent = step_together(plan_alone, process_group, doing).mine
    try:
        agreed = planner.finish_plan(wrapper.reduce_scatter("plan", lambda: sent, agree))
    except CheckpointException as raised:  # which is no Exception, and the same on all ranks
        raise CheckpointingException(f"{doing}: {raised}") from raised
    gather_from(lambda: storage_writer.prepare_write_data(agreed, planner), process_group, "copying values to save")
    planned = storage_writer, metadata, wrapper
    return planned if enable_cache is not None else (planned, agreed, sent, False, False)


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: DistWrapper
) -> None:
    """Write the index of what all ranks have written. Called by every rank of the group; an error is raised on all."""
    doing = f"saving checkpoint {storage_writer.checkpoint_dir}"
    written = gather_from(storage_writer.take_rows, dist_wrapper.group, doing)

    def finish() -> None:
        if dist_wrapper.is_coordinator:
            assert global_metadata is not None, "the coordinator has planned"
            storage_writer.finish(global_metadata, [[result_of(row) for row in rows] for rows in written])

    take_step(finish, dist_wrapper.group, doing)
