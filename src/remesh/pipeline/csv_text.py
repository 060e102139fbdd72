"""CSV form of schedules, as ``torch.distributed.pipelining`` reads and writes it.

One line for each rank, one cell for each action: F, B, I and W. An empty cell is an idle slot and means nothing. Two
fused actions, ``(2F1;0B0)OVERLAP_F_B``, stand in one cell; read, they are two actions in that order. This is torch's
``compute_only``, from which its runtime makes all else.

What a table has besides is read over: sends and receives, which follow from the stage graph, and UNSHARD, RESHARD,
REDUCE_GRAD and all that waits, which belong to the runtime that made the table.
"""

from __future__ import annotations

import csv
import re

from remesh.pipeline.actions import Action
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule

_READ_OVER = re.compile(
    r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_(REDUCE_GRAD|SEND_F|SEND_B))\d*", re.ASCII
)
_FUSED = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B", re.ASCII)


def write_csv(schedule: Schedule) -> str:
    """The schedule as CSV, as torch's ``_load_csv`` reads it with ``format="compute_only"``.

    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> print(write_csv(one_f_one_b(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def read_csv(text: str, *, name: str = "table") -> Schedule:
    """The schedule that a table means, without its communication; `PipelineError` names the row and the cell that
    cannot be."""
    rows = tuple(
        tuple(action for number, cell in enumerate(cells) for action in _read_cell(cell, f"{name}:{line}:{number}"))
        for line, cells in enumerate(csv.reader(text.splitlines()))
    )
    found = [action for row in rows for action in row]
    if not found:
        raise PipelineError(f"reading the schedule {name!r}: found no F, B, I or W in it; name a file with a schedule")
    num_stages = 1 + max(action.stage for action in found)
    return Schedule(name, num_stages, 1 + max(action.microbatch for action in found), rows)


def _read_cell(cell: str, where: str) -> list[Action]:
    """What a cell computes; ``where`` is table, row and cell, counted from 0."""
    cell = cell.strip()
    if not cell or _READ_OVER.fullmatch(cell):
        return []
    fused = _FUSED.fullmatch(cell)
    try:
        return [Action.parse(part) for part in (fused.groups() if fused else (cell,))]
    except PipelineError as error:
        raise PipelineError(f"reading {where} (row and cell count from 0): {error}") from error
