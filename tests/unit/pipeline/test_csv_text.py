"""Tables as CSV: ours read back, and exchanged with torch's schedules both ways where this torch has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remesh.pipeline.csv_text import read_csv, write_csv
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule_check import check_schedule
from remesh.pipeline.schedules import SCHEDULES, one_f_one_b, zero_bubble_h1

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
torch_visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")


def _runtime(num_ranks: int, num_microbatches: int, num_stages: int) -> Any:
    """Torch's runtime on a stage that only has numbers."""
    if not hasattr(torch_schedules, "_PipelineScheduleRuntime"):
        pytest.skip("this torch has no _PipelineScheduleRuntime")
    stage = mock.Mock()
    stage.num_stages, stage.group_size, stage.group_rank, stage.is_last, stage.submod = (
        num_stages,
        num_ranks,
        0,
        False,
        None,
    )
    return torch_schedules._PipelineScheduleRuntime([stage], num_microbatches)


def _is_of_runtime(action: Any) -> bool:
    return any(word in str(action) for word in ("SHARD", "REDUCE_GRAD", "WAIT"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_reads_back(name: str) -> None:
    schedule = SCHEDULES[name](4, 6)
    assert read_csv(write_csv(schedule), name=name) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_our_tables_and_finds_no_deadlock(name: str, table: Path) -> None:
    schedule = SCHEDULES[name](4, 6)
    table.write_text(write_csv(schedule))
    runtime = _runtime(4, 6, 4)
    runtime._load_csv(str(table), format="compute_only")
    # Torch's simulator knows compute and communication only.
    for rank, row in runtime.pipeline_order_with_comms.items():
        runtime.pipeline_order_with_comms[rank] = [action for action in row if not _is_of_runtime(action)]
    steps = runtime._simulate()
    compute = {action for row in steps.values() for action in row if action is not None and action.is_compute_op}
    assert {str(action) for action in compute} == {str(action) for action in schedule.actions()}


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_we_read_what_torch_dumps(form: str, table: Path) -> None:
    schedule = zero_bubble_h1(4, 6)
    table.write_text(write_csv(schedule))
    runtime = _runtime(4, 6, 4)
    runtime._load_csv(str(table), format="compute_only")
    runtime._dump_csv(str(table), format=form)
    assert read_csv(table.read_text(), name="zb-h1") == schedule


TORCH_TABLES = (
    *(("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)),
    *(("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)),
)


@pytest.mark.parametrize(("name", "stages_per_rank"), TORCH_TABLES)
def test_schedules_of_torch_are_complete_and_without_deadlock(name: str, stages_per_rank: int) -> None:
    try:
        torch_schedules.get_schedule_class(name)
    except ValueError:
        pytest.skip(f"this torch has no schedule {name}")
    rows = torch_visualizer.get_schedule_ops(name, 4, 8, stages_per_rank)
    text = "".join(",".join("" if action is None else str(action) for action in row) + "\n" for row in rows)
    schedule = read_csv(text, name=name)
    assert (schedule.num_stages, schedule.num_microbatches) == (4 * stages_per_rank, 8)
    check_schedule(schedule, StageGraph.chain(schedule.num_stages))


def test_our_1f1b_is_that_of_torch() -> None:
    theirs = torch_visualizer.get_schedule_ops("1F1B", 4, 8)
    ours = one_f_one_b(4, 8)
    found = [[str(a) for a in row if a is not None and not _is_of_runtime(a)] for row in theirs]
    # The last row of torch 2.13 counts its forwards from 1, which `check_schedule` refuses: not what it runs.
    assert found[:-1] == [[str(a) for a in row] for row in ours.rows[:-1]]


def test_fused_actions_are_read_as_two_and_idle_slots_as_none() -> None:
    schedule = read_csv("0F0,,(0F1;0B0)OVERLAP_F_B,0B1\n,1F0,1B0,1F1,1B1\n")
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "found no F, B, I or W"),
        ("0SEND_F0\n", "found no F, B, I or W"),
        ("0F0,0X0\n", r"table:0:1 .*'0X0'"),
        ('"unclosed\n', "unclosed"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_place(text: str, match: str) -> None:
    with pytest.raises(PipelineError, match=match):
        read_csv(text)
