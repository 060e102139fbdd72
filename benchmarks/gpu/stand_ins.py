"""What could go wrong on devices, and which test shows on the CPU that it does not, by what stands in for a device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[2] / "tests"


class Shown(NamedTuple):
    """One thing that is shown without a device."""

    what: str
    test: str
    """Its name, which no other test has."""
    by: str = ""
    """What stands in; empty where nothing has to."""

    @property
    def file(self) -> str:
        """Where the test is, below ``tests``; ValueError unless it is in one place."""
        found = [file for file, names in _tests_by_file().items() if self.test in names]
        if len(found) != 1:
            raise ValueError(f"found {self.test} in {found}, expected one file")
        return found[0]


@cache
def _tests_by_file() -> dict[str, frozenset[str]]:
    return {
        str(path.relative_to(TESTS)): frozenset(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
        for path in TESTS.rglob("test_*.py")
    }


_LATE = "streams that are late, an allocator that hands memory on at once"
_BELIEVED = "groups without tags, whose waits return whatever became of an operation, and whose batches may stay open"
_REFUSING = "an allocator that refuses on one rank"
SHOWN = (
    Shown(
        "a save has the values of its call",
        "test_no_wait_can_be_left_out",
        _LATE,
    ),
    Shown(
        "locked memory is used again behind its events",
        "test_memory_is_neither_unlocked_nor_used_again_under_a_copy",
        _LATE,
    ),
    Shown(
        "threads go on with their caller's streams",
        "test_a_thread_follows_the_streams_of_its_caller_and_sets_no_default_one",
        "streams by name",
    ),
    Shown(
        "readers of a refit see whole versions",
        "test_no_part_of_the_order_can_be_left_out",
        _LATE,
    ),
    Shown(
        "values cross beside the compute, and in order",
        "test_no_wait_of_a_side_stream_can_be_left_out",
        _LATE,
    ),
    Shown(
        "a pipeline over NCCL ends",
        "test_devices_end_in_every_order_of_events",
        "every order of events",
    ),
    Shown(
        "a pipeline over NCCL has the gradients of one process",
        "test_random_pipelines_over_nccl_have_the_gradients_of_one_process",
        _BELIEVED,
    ),
    Shown(
        "one communicator for a group, no pair without bytes",
        "test_messages_go_out_in_batches_to_those_who_take_alone",
        _BELIEVED,
    ),
    Shown(
        "a message that torch gave up is an error on all ranks",
        "test_a_message_that_was_given_up_is_told_on_all_ranks",
        _BELIEVED,
    ),
    Shown(
        "a batch that was broken off keeps nothing later from starting",
        "test_who_was_broken_off_in_a_batch_goes_on_in_a_new_group",
        _BELIEVED,
    ),
    Shown(
        "communicators are aborted at once, and a hanging abort is told",
        "test_severing_returns_while_an_abort_hangs_and_shedding_says_that_the_process_is_of_no_use",
        "communicators that hang",
    ),
    Shown(
        "`TORCH_NCCL_*` settings by which a process ends are refused",
        "test_the_member_with_such_a_setting_is_named",
    ),
    Shown(
        "each verb takes the memory that it plans",
        "test_a_verb_takes_what_it_plans",
        "the pages of the process",
    ),
    Shown(
        "device memory of an unmodified program goes through checkpoints, and onto another device",
        "test_what_is_on_a_device_goes_through_checkpoints_and_a_restart_on_another_device",
        "a driver whose device is a number and an open file",
    ),
)
BAD_INPUT = (
    Shown(
        "ranks share a device",
        "test_ranks_that_share_a_device_are_told_on_all_ranks_whatever_they_call",
        "members that tell one device",
    ),
    Shown(
        "some ranks have a device, others none",
        "test_ranks_with_and_without_a_device_do_not_wait_for_each_other",
        "communicators that hang",
    ),
    Shown(
        "a stage lies on another device than its group",
        "test_a_stage_on_another_gpu_than_its_group_is_refused",
    ),
    Shown(
        "a tensor of the host, a group over NCCL: goes by the device",
        "test_tensors_of_the_host_go_through_the_device_of_the_group",
    ),
    Shown(
        "GPUs that do not reach each other: told, NCCL goes by the host",
        "test_peers_reach_each_others_memory",
        "nothing; needs 2 GPUs",
    ),
    Shown(
        "no memory for a reshard",
        "test_memory_that_is_not_to_be_had_is_told_on_all_ranks_before_anything_moves",
        _REFUSING,
    ),
    Shown(
        "no memory in a later window of a reshard",
        "test_memory_that_is_gone_in_a_later_window_is_told_on_all_and_costs_nothing",
        _REFUSING,
    ),
    Shown(
        "no memory for a new mesh",
        "test_a_rank_without_memory_for_its_part_is_told_on_all_ranks_and_what_is_held_stands",
        _REFUSING,
    ),
    Shown(
        "no memory in a later window of `job.carry`",
        "test_moments_without_memory_in_a_later_window_are_told_on_all_ranks_and_nothing_is_lost",
        _REFUSING,
    ),
    Shown(
        "no memory for what a load reads",
        "test_a_rank_without_memory_for_what_it_reads_is_told_on_all",
        _REFUSING,
    ),
    Shown(
        "no memory for the second buffer of a `Refit`",
        "test_a_generator_without_memory_for_a_second_buffer_is_told_on_all_ranks",
        _REFUSING,
    ),
    Shown(
        "no locked memory, or a device lost (Xid), in the middle of a save",
        "test_a_refusal_of_one_device_is_told_on_all_ranks_and_leaves_no_checkpoint",
        "a device that refuses",
    ),
)
